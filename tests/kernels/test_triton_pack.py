"""Casts that are written out for the hardware, against torch's: on a GPU alone, for the interpreter's are
wrong (tests/kernels/quantize/test_triton_quantize.py); what it takes instead is held to exact values."""

import pytest
import torch
from with_triton import tl, triton

from loka.kernels.triton import pack

byte, half, whole = pack.byte, pack.half, pack.whole
FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]


@triton.jit
def _words(x_ptr, words_ptr, singles_ptr, OUT: tl.constexpr, COLUMNS: tl.constexpr):
    """Of x [4, COLUMNS]: each column as a word, and each value as a byte."""
    column = tl.arange(0, COLUMNS)
    value_0, value_1 = tl.load(x_ptr + column), tl.load(x_ptr + COLUMNS + column)
    value_2, value_3 = tl.load(x_ptr + 2 * COLUMNS + column), tl.load(x_ptr + 3 * COLUMNS + column)
    packed = whole(half(value_0, value_1, OUT), value_2, value_3, OUT)
    tl.store(words_ptr + column, packed)
    row = tl.arange(0, 4)
    place = row[:, None] * COLUMNS + column[None, :]
    tile = tl.load(x_ptr + place)
    tl.store(singles_ptr + place, byte(tile, OUT))


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_four_values_in_a_word(format, device):
    torch.manual_seed(0)
    x = (torch.randn(4, 64) * 2.0 ** torch.randint(-6, 7, (4, 64))).to(format).float()  # exact in FP8
    if device.type == "cuda":
        x = x * 1.03  # and to be rounded
        x[0, :4] = torch.tensor([0.0, -0.0, 1e9, -1e9])
    expected = x.clamp(-torch.finfo(format).max, torch.finfo(format).max).to(format).view(torch.uint8)
    words = torch.empty(64, dtype=torch.int32, device=device)
    singles = torch.empty(4, 64, dtype=torch.int32, device=device)
    _words[(1,)](x.to(device), words, singles, OUT=pack.TRITON_TYPES[format], COLUMNS=64)
    assert torch.equal(words.view(torch.uint8).view(64, 4).t().cpu(), expected)
    assert torch.equal(singles.cpu(), expected.int())
