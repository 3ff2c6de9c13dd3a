"""bf16 with padded sides, as torch.compile runs it (measurement/times/hp_call.py)."""

import pytest
import torch
from timers import FakeTimer, install

from loka.core.problem import linear_problem
from loka.core.recipe import Gemm
from loka.measurement.operands import sides
from loka.measurement.settings import Settings
from loka.measurement.times import hp_call, site_times

ROWWISE = "emulated:rowwise_e4m3"


def operands(inputs):
    torch.manual_seed(0)
    x, dy = torch.randn(40, inputs).bfloat16(), torch.randn(40, 56).bfloat16()
    return {"input": x, "weight": torch.randn(56, inputs), "grad_output": dy}


@pytest.mark.parametrize("gemm", list(Gemm))
def test_padding_changes_nothing(gemm):
    a, b = sides(gemm, operands(23))
    found = hp_call.multiply_padded(a, b, torch.bfloat16)
    expected = a @ b.to(a.dtype).t()
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected)  # sums of bf16 in another order, rounded once


@pytest.mark.parametrize(("inputs", "padded", "runs"), [(23, 40.0, True), (23, 120.0, False), (24, 40.0, False)])
@pytest.mark.parametrize("gemm", list(Gemm))
def test_bf16_is_what_is_faster(gemm, inputs, padded, runs, monkeypatch):
    timer = install(monkeypatch, FakeTimer({"hp": 100.0, "hp, padded": padded, ROWWISE: 50.0}))
    ran = []
    product = hp_call.multiply_padded
    monkeypatch.setattr(hp_call, "multiply_padded", lambda *args: ran.append(len(timer.races)) or product(*args))
    dtype = "bfloat16"
    problem = linear_problem(gemm, rows=40, in_features=inputs, out_features=56, dtype=dtype, target="cpu")
    cpu, settings = torch.device("cpu"), Settings()
    site_times.time_site([operands(inputs)], problem, ["hp", ROWWISE], device=cpu, settings=settings)
    races = [["hp", "hp, padded"], ["hp", ROWWISE]]
    assert timer.races == races[inputs == 24 :]
    assert (len(races) in ran) is runs
