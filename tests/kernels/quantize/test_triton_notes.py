import pytest
import torch
import with_triton  # noqa: F401

from loka.kernels.quantize.side import RUNS
from loka.kernels.quantize.triton import notes


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), None])
def test_scales_that_are_not_finite_set_their_flag_alone(bad, device):
    """Of sizes that are one program's, several and less than one; the last place counts as the first."""
    sizes = [1, 8192, 9000, 20000, 7, 3]
    scales = [torch.ones(size, device=device) for size in sizes]
    places = [1, 2, 4, 5, 7, 8]
    healths = [torch.zeros(3, 3, dtype=torch.int64, device=device) for _ in sizes]
    if bad is not None:
        for scale in scales[::2]:
            scale[-1] = bad
    notes.note_fused(healths, scales, places)
    notes.note_fused(healths, [scale.clone() for scale in scales], places)  # at other addresses, as launched again
    for number, (health, place) in enumerate(zip(healths, places, strict=True)):
        expected = torch.zeros(9, dtype=torch.int64)
        if place % 3 == 1:
            expected[place // 3 * 3 + RUNS] = 2
        if bad is not None and number % 2 == 0:
            expected[place] = 1
        assert torch.equal(health.cpu().view(-1), expected), place


@pytest.mark.slow
def test_more_entries_than_a_launch_takes(device):
    count = 130
    health = torch.zeros(3, 3, dtype=torch.int64, device=device)
    scales = [torch.full((5,), float("nan") if number == 129 else 1.0, device=device) for number in range(count)]
    notes.note_fused([health] * count, scales, [1] * (count - 1) + [5])
    assert health.view(-1).tolist() == [count - 1, 0, 0, 0, 0, 1, 0, 0, 0]
