"""Kernels that exist for a while, and races of them where there is no GPU."""

import sys
from contextlib import contextmanager
from unittest import mock

from loka.kernels.gemm import registry


def forget():
    """What was found out of the kernels there were."""
    for cached in (registry.all_candidates, registry.candidate_named, registry.require_supported):
        cached.cache_clear()


@contextmanager
def registered(*kernels, alone=False):
    """`kernels` are in the registry for a while, beside what is there or alone."""
    try:
        with mock.patch.dict(registry.KERNELS, {kernel.name: kernel for kernel in kernels}, clear=alone):
            forget()
            yield
    finally:
        forget()


def time_on_cpu(monkeypatch):
    """`measure` takes the CPU for a device that can be timed, and compiles no regions ahead."""
    measure = sys.modules["loka.measurement.measure"]
    monkeypatch.setattr(measure, "timeable", lambda device: True)
    monkeypatch.setattr(measure, "compile_regions_ahead", lambda *cells: [])
