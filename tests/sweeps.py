"""Sweeps: some cases in every run of the tests, the rest under `make sweep`."""

import pytest


def sweep(names, always):
    """Parameters for all of `names`, tuples of several; those beside `always` are marked slow."""
    kept = set(always)
    return [name if name in kept else _slow(*name if isinstance(name, tuple) else (name,)) for name in names]


def _slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)
