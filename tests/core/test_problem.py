import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loka.core.exceptions import UnknownName
from loka.core.problem import Problem, capability, linear_problem, round_up, target_of
from loka.core.recipe import Gemm
from loka.core.storage.codec import decode, encode

SIDES = st.integers(1, 10_000)


@given(st.integers(1, 99), st.integers(0, 9))
def test_a_capability_is_read_back_from_its_target(major, minor):
    assert capability(f"sm_{major}{minor}") == (major, minor)


@pytest.mark.parametrize("target", ["cpu", "mps", "xpu", "meta"])
def test_other_devices_have_no_capability(target):
    assert capability(target) is None
    assert target_of(torch.device(target)) == target


@pytest.mark.parametrize("target", ["", "cuda", "sm_", "sm_9", "sm_9x", "sm90", "h100"])
def test_what_names_no_target_is_refused(target):
    with pytest.raises(UnknownName, match="no target is called"):
        capability(target)


def test_a_gpu_is_named_by_its_capability(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert target_of(torch.device("cuda", 1)) == "sm_90"


@given(SIDES, SIDES)
def test_rounding_up_adds_less_than_the_multiple(value, multiple):
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert value <= rounded < value + multiple


@given(SIDES, SIDES, SIDES)
def test_the_gemms_of_a_layer_compute_what_autograd_would(rows, inner, outer):
    def sides(gemm):
        made = linear_problem(gemm, rows=rows, in_features=inner, out_features=outer, dtype="bfloat16", target="cpu")
        return made.m, made.n, made.k

    assert sides(Gemm.OUTPUT) == (rows, outer, inner)
    assert sides(Gemm.GRAD_INPUT) == (rows, inner, outer)
    assert sides(Gemm.GRAD_WEIGHT) == (outer, inner, rows)


@pytest.mark.parametrize("wrong", [{"m": 0}, {"n": -1}, {"k": 0}, {"dtype": "int8"}])
def test_a_record_of_no_problem_is_refused(wrong):
    smallest = Problem(gemm=Gemm.OUTPUT, m=1, n=1, k=1, dtype="float64", target="cpu")
    assert decode(Problem, encode(smallest)) == smallest
    with pytest.raises(ValueError, match="is no problem"):
        decode(Problem, {**encode(smallest), **wrong})


@given(SIDES, SIDES, SIDES)
def test_padding_rounds_each_side_to_its_own_multiple(m, n, k):
    padded = Problem(gemm=Gemm.OUTPUT, m=m, n=n, k=k, dtype="float64", target="cpu").padded((16, 8, 4))
    assert (padded.m, padded.n, padded.k) == (round_up(m, 16), round_up(n, 8), round_up(k, 4))
