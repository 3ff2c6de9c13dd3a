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


def problem_of(gemm, inputs):
    return linear_problem(gemm, rows=40, in_features=inputs, out_features=56, dtype="bfloat16", target="cpu")


@pytest.mark.parametrize("gemm", list(Gemm))
def test_padding_changes_nothing(gemm):
    a, b = sides(gemm, operands(23))
    assert all(side % 8 == 0 for each in (a, b) for side in hp_call.in_lines(each).shape)
    found = hp_call.padded_call([(a, b)], problem_of(gemm, 23))()
    torch.testing.assert_close(found, a @ b.to(a.dtype).t())  # sums of bf16 in another order, rounded once


@pytest.mark.parametrize(("inputs", "padded", "runs"), [(23, 40.0, True), (23, 120.0, False), (24, 40.0, False)])
@pytest.mark.parametrize("gemm", list(Gemm))
def test_bf16_is_what_is_faster(gemm, inputs, padded, runs, monkeypatch):
    timer = install(monkeypatch, FakeTimer({"hp": 100.0, "hp, padded": padded, ROWWISE: 50.0}))
    ran = []
    made = site_times.padded_call

    def noted(*args):
        call = made(*args)
        return lambda: ran.append(len(timer.races)) or call()

    monkeypatch.setattr(site_times, "padded_call", noted)
    cpu, settings = torch.device("cpu"), Settings()
    site_times.time_site([operands(inputs)], problem_of(gemm, inputs), ["hp", ROWWISE], device=cpu, settings=settings)
    races = [["hp", "hp, padded"], ["hp", ROWWISE]]
    assert timer.races == races[inputs == 24 :]
    assert (len(races) in ran) is runs
