"""What the quantizer leaves beside the FP8 data: maxima for the next step, counts and flags."""

from __future__ import annotations

import math

import pytest
import torch

from loka.core.recipe import Cast, Format, Granularity
from loka.kernels.quantize.quantizer import quantize_operand, quantize_pair
from loka.kernels.quantize.side import BAD_A, BAD_B, RUNS, Side

TENSOR = Cast(Format.E4M3, Granularity.TENSOR)
ROW = Side(cast=TENSOR, padded=(2, 3))


def maximum(seen: torch.Tensor) -> float:
    return seen.view(torch.float32).item()


def test_the_maximum_seen_only_rises() -> None:
    """The parts of an accumulated step are one tensor to the next step's scale."""
    seen = torch.zeros(1, dtype=torch.int32)
    given = torch.ones(1)
    for top, expected in ((4.0, 4.0), (-9.0, 9.0), (2.0, 9.0), (9.5, 9.5)):
        hp = torch.full((2, 3), 0.5)
        hp[1, 2] = top
        quantize_pair(hp, row=ROW, column=None, given=given, seen=seen)
        assert maximum(seen) == expected
    nothing = Side(cast=TENSOR, padded=(0, 3))
    quantize_pair(torch.zeros(0, 3), row=nothing, column=None, given=given, seen=seen)
    assert maximum(seen) == 9.5
    quantize_pair(torch.full((2, 3), math.inf), row=ROW, column=None, given=given, seen=seen)
    assert maximum(seen) == math.inf


def test_runs_are_counted_and_flags_stay() -> None:
    health = torch.zeros(3, dtype=torch.int64)
    for value, slot in ((1.0, BAD_A), (math.nan, BAD_B), (1.0, BAD_B), (1.0, BAD_A)):
        hp = torch.full((2, 3), value)
        quantize_operand(hp, TENSOR, padded=(2, 3), health=health, slot=slot)
    assert health.tolist() == [2, 0, 1]
    assert health[RUNS] == 2


@pytest.mark.parametrize("transposed", [False, True])
def test_an_operand_is_itself_however_it_lies(transposed: bool) -> None:
    hp = torch.arange(6.0).view(3, 2).t() if transposed else torch.arange(6.0).view(2, 3)
    quantized = quantize_operand(hp, TENSOR, padded=(2, 3), health=None, slot=BAD_A)
    assert torch.equal((quantized.data.float() * quantized.scale).round(), hp)
