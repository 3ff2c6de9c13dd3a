"""The C interface of cuBLASLt, of which fake_cublaslt.py has no numbers of its own."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from loka.kernels.gemm.adapters import cublaslt_c as lt


def test_the_c_interface_is_that_of_the_header():
    """Numbers, structures and arguments of cublasLt.h, CUDA 13.0."""
    assert {each.name: int(each) for each in lt.Desc} == {
        "TRANSA": 3, "A_SCALE_POINTER": 17, "B_SCALE_POINTER": 18, "FAST_ACCUM": 25,
        "A_SCALE_MODE": 31, "B_SCALE_MODE": 32,
    }  # fmt: skip
    alignments = {f"MIN_ALIGNMENT_{matrix}_BYTES": 5 + place for place, matrix in enumerate("ABCD")}
    wishes = {"MAX_WORKSPACE_BYTES": 1, "REDUCTION_SCHEME_MASK": 3, **alignments}
    assert {each.name: int(each) for each in lt.Preference} == wishes
    scales = {"SCALAR_32F": 0, "OUTER_VEC_32F": 3, "VEC128_32F": 4, "BLK128x128_32F": 5}
    assert {each.name: int(each) for each in lt.Scale} == scales
    result = lt.HEURISTIC_RESULT
    assert {name: result.fields[name][1] for name in result.names} == {
        "algo": 0, "workspace_size": 64, "state": 72, "waves_count": 76, "reserved": 80,
    }  # fmt: skip
    assert result.itemsize == 96
    counts = {name: len(kinds) for name, kinds in lt._FUNCTIONS.items() if "Destroy" not in name}
    assert counts == {
        "Create": 1, "MatmulDescCreate": 3, "MatmulDescSetAttribute": 4, "MatrixLayoutCreate": 5,
        "MatmulPreferenceCreate": 1, "MatmulPreferenceSetAttribute": 4, "MatmulAlgoGetHeuristic": 10, "Matmul": 16,
    }  # fmt: skip
    assert lt._FUNCTIONS["MatmulAlgoGetHeuristic"].index(ctypes.c_int) == 7
    assert lt._FUNCTIONS["Matmul"].index(ctypes.c_size_t) == 14


@pytest.fixture
def afresh():
    cached = lt.why_missing, lt._functions
    for each in cached:
        each.cache_clear()
    yield
    for each in cached:
        each.cache_clear()


def test_a_torch_without_cuda_has_none(afresh, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert lt.why_missing() == "this torch brings no cuBLASLt: it is built without CUDA"


def test_the_library_is_that_of_torchs_cuda(afresh, monkeypatch):
    asked = []

    def library(name):
        asked.append(name)
        return SimpleNamespace(**{f"cublasLt{function}": SimpleNamespace() for function in lt._FUNCTIONS})

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ctypes, "CDLL", library)
    assert "cublasLtGetStatusName" in lt.why_missing(), "a function that it lacks"
    assert asked == ["libcublasLt.so.13"]
