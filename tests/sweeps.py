"""Sweeps: some cases in every run of the tests, the rest under `make sweep`."""

from collections.abc import Iterable
from typing import Any

import pytest


def sweep(names: Iterable[Any], always: Iterable[Any]) -> list[Any]:
    """Parameters for all of `names`, tuples of several; those beside `always` are marked slow."""
    kept = set(always)
    return [name if name in kept else _slow(*name if isinstance(name, tuple) else (name,)) for name in names]


def _slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)
