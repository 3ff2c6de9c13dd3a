import pytest
import torch
import with_triton  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st

from loka.kernels.edge.triton import transpose
from loka.nn.fp8_weight import bytes_transposed

EVERY_BYTE = torch.arange(256, dtype=torch.uint8)


def matrix(rows, columns, device="cpu"):
    """Every byte, NaN and both zeros among them, none where it was by chance."""
    picks = torch.randint(256, (rows, columns), generator=torch.Generator().manual_seed(rows))
    return EVERY_BYTE[picks].view(torch.float8_e4m3fn).to(device)


def same(found, expected):
    assert found.dtype == expected.dtype
    assert found.is_contiguous()
    assert torch.equal(found.cpu().view(torch.uint8), expected.cpu().view(torch.uint8).t())


@settings(max_examples=12)
@given(fours=st.integers(1, 70), columns=st.integers(1, 200))
def test_a_transpose_is_every_byte(fours, columns):
    row = matrix(4 * fours, columns)
    same(transpose.transpose_fused(row), row)


@pytest.mark.parametrize("shape", [(4, 1), (128, 64), (132, 65), (256, 48)])
def test_tiles_and_what_is_beside_them(shape, device):
    row = matrix(*shape, device)
    same(transpose.transpose_fused(row), row)


@pytest.mark.parametrize("row", [matrix(5, 16), matrix(0, 16), matrix(16, 0), matrix(16, 32)[:, ::2], matrix(8, 16)])
def test_what_fits_no_kernel_is_transposed_too(row, device, monkeypatch):
    ran = []
    kernel = transpose.transpose_fused
    monkeypatch.setattr(transpose, "transpose_fused", lambda given: ran.append(1) or kernel(given))
    given = row.to(device) if row.is_contiguous() else torch.cat([row, row], 1).to(device)[:, : row.shape[1]]
    same(bytes_transposed(given), given)
    fits = device.type == "cuda" and given.is_contiguous() and given.numel() and len(given) % 4 == 0
    assert bool(ran) == bool(fits)


@pytest.mark.gpu
def test_large_ones_on_a_gpu():
    for shape in ((2048, 24576), (512, 3456), (6144, 100)):
        row = matrix(*shape, "cuda")
        same(transpose.transpose_fused(row), row)
