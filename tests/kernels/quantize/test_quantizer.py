import math

import pytest
import torch

from loka.core.recipe import Cast, Format, Granularity
from loka.kernels.quantize.quantizer import quantize_operand
from loka.kernels.quantize.side import BAD_A, BAD_B, RUNS

TENSOR = Cast(Format.E4M3, Granularity.TENSOR)


def test_runs_are_counted_and_flags_stay():
    health = torch.zeros(3, dtype=torch.int64)
    for value, slot in ((1.0, BAD_A), (math.nan, BAD_B), (1.0, BAD_B), (1.0, BAD_A)):
        hp = torch.full((2, 3), value)
        quantize_operand(hp, TENSOR, padded=(2, 3), health=health, slot=slot)
    assert health.tolist() == [2, 0, 1]
    assert health[RUNS] == 2


@pytest.mark.parametrize("transposed", [False, True])
def test_an_operand_is_itself_however_it_lies(transposed):
    hp = torch.arange(6.0).view(3, 2).t() if transposed else torch.arange(6.0).view(2, 3)
    quantized = quantize_operand(hp, TENSOR, padded=(2, 3), health=None, slot=BAD_A)
    assert torch.equal((quantized.data.float() * quantized.scale).round(), hp)
