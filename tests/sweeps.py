"""Sweeps over the foreign models: some in every run of the tests, the rest under `make sweep`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sweep(names: Iterable[Any], always: Iterable[Any]) -> list[Any]:
    """Parameters for all of `names`; those beside `always` are marked slow."""
    kept = set(always)
    return [name if name in kept else pytest.param(name, marks=pytest.mark.slow) for name in names]
