"""Libraries that are not installed, or broken: each kernel says what is missing, and how to get it."""

import importlib.util
import sys

import pytest
import torch
from fake_libraries import module

from loka.cli.commands.doctor import diagnose
from loka.kernels.gemm import libraries
from loka.kernels.gemm.registry import KERNELS


@pytest.fixture
def fresh():
    libraries.why_missing.cache_clear()
    yield
    libraries.why_missing.cache_clear()


@pytest.mark.parametrize("name", libraries.ADAPTED)
def test_absent_library(name, monkeypatch, fresh):
    library = libraries.ADAPTED[name]
    monkeypatch.delitem(sys.modules, library.module, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    for kernel in (k for k in KERNELS.values() if k.library == name):
        assert kernel.missing() == f"not installed ({library.install})"


@pytest.mark.parametrize("name", libraries.ADAPTED)
def test_broken_library(name, monkeypatch, fresh):
    library = libraries.ADAPTED[name]
    module(monkeypatch, library.module)
    monkeypatch.setattr(torch, "ops", object())

    def broken(name):
        raise OSError("undefined symbol: _ZN5torch3jit\nand more lines")

    monkeypatch.setattr(importlib, "import_module", broken)
    for kernel in (k for k in KERNELS.values() if k.library == name):
        reason = kernel.missing() or ""
        assert reason.startswith("installed, but does not load: OSError: undefined symbol: _ZN5torch3jit")
        assert "more lines" not in reason


def test_doctor_names_every_library(monkeypatch, fresh):
    reasons = dict.fromkeys(libraries.ADAPTED, "not installed (in this test)")
    reasons["torchao"] = "installed, but does not load: ImportError: no"
    monkeypatch.setattr("loka.cli.commands.doctor.why_missing", reasons.get)
    text = diagnose("sm_90")
    for name in (*libraries.ADAPTED, *libraries.WITHOUT_ADAPTER):
        assert f"\n{name} " in text
    assert "does not load: ImportError" in text
    lines = {line.strip().partition(":")[0]: line for line in text.splitlines()}
    assert "blockwise_e4m3 grad_weight: has no GEMM of two operands" in lines["fbgemm"]
    assert lines["deep_gemm"].strip() == "deep_gemm: blockwise_e4m3"
    assert "fbgemm:rowwise_e4m3" not in text, "a missing library takes one line a kernel"
    assert "built for sm_90, not for sm_100" in diagnose("sm_100")
    reasons["fbgemm"] = None
    assert "fbgemm:rowwise_e4m3" in diagnose("sm_90")
