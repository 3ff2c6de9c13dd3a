"""Delayed scales: what the maxima imply, and what must not spoil them."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from loka.nn.scale_book import HISTORY, ScaleBook, Slot


def bits(value: float) -> torch.Tensor:
    return torch.tensor([value]).view(torch.int32)


def step(book: ScaleBook, *maxima: float) -> None:
    """One step in which kernels met these maxima."""
    for slot, value in enumerate(maxima):
        seen = book.seen(slot)
        torch.maximum(seen, bits(value).to(seen.device), out=seen)
    book.update()


def implied(amax: float, *, largest: float = 448.0, margin: int = 0) -> float:
    """The least power of two under which `amax` and `margin` octaves more fit."""
    exponent = -100
    while amax * 2.0**margin > largest * 2.0**exponent and exponent < 100:
        exponent += 1
    return 2.0**exponent


def book_of(count: int, device: torch.device, **rules: float) -> ScaleBook:
    return ScaleBook([Slot(name=f"slot{place}", **rules) for place in range(count)], device, units=3)


@pytest.mark.parametrize(
    "amax",
    [448.0, 448.0 * (1 + 2**-23), 448.0 * (1 - 2**-24), 1.0, 1.75, 1.7500001, 3e-5, 7e4, 2.0**-40, 3.3e38],
)
@pytest.mark.parametrize("margin", [0, 1, -2, 5])
@pytest.mark.parametrize("largest", [448.0, 57344.0])
def test_the_scale_is_the_least_power_of_two_that_fits(
    amax: float, margin: int, largest: float, device: torch.device
) -> None:
    book = book_of(1, device, largest=largest, margin=margin)
    value = torch.tensor(amax).item()
    step(book, value)
    assert book.scale(0).item() == implied(value, largest=largest, margin=margin)
    primed = book_of(1, device, largest=largest, margin=margin)
    primed.prime(0, torch.tensor(amax, device=device))
    assert primed.scale(0).item() == book.scale(0).item()


@pytest.mark.parametrize("amax", [1e-45, 1.1754944e-38, 1e-37])
def test_tiny_maxima_stop_at_the_lowest_scale(amax: float, device: torch.device) -> None:
    book = book_of(1, device)
    step(book, amax)
    assert book.scale(0).item() == 2.0**-100


def test_a_maximum_counts_for_sixteen_steps(device: torch.device) -> None:
    book = book_of(1, device)
    step(book, 448.0 * 8)
    for _ in range(HISTORY - 1):
        step(book, 1.0)
        assert book.scale(0).item() == 8.0
    step(book, 1.0)
    assert book.scale(0).item() == implied(1.0)


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_an_empty_or_bad_step_leaves_everything_as_it_was(bad: float, device: torch.device) -> None:
    book = book_of(2, device)
    step(book, 3.0, 100.0)
    before = copy.deepcopy(book)
    step(book, bad, 200.0)
    assert book.scale(0).item() == before.scale(0).item() == implied(3.0)
    assert torch.equal(book.buffers.history[0], before.buffers.history[0])
    assert book.scale(1).item() == implied(200.0)
    assert book.seen(0).item() == 0
    # the ring goes on where it was: bad steps do not shorten the memory
    for _ in range(HISTORY - 1):
        step(book, 1.0, 1.0)
    assert book.scale(0).item() == implied(3.0)
    step(book, 1.0, 1.0)
    assert book.scale(0).item() == implied(1.0)


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_priming(bad: float, dtype: torch.dtype, device: torch.device) -> None:
    """It fills the ring: the maximum lasts for 16 steps. One that says nothing changes nothing."""
    book = book_of(3, device)
    assert not book.primed(1)
    book.prime(1, torch.tensor(7.0, dtype=dtype, device=device))
    assert [book.primed(slot) for slot in range(3)] == [False, True, False]
    assert book.scale(1).item() == implied(7.0)
    assert [book.scale(0).item(), book.scale(2).item()] == [1.0, 1.0]
    for _ in range(HISTORY - 1):
        step(book, 0.5, 0.5)
        assert book.scale(1).item() == implied(7.0)
    step(book, 0.5, 0.5)
    assert book.scale(1).item() == implied(0.5)
    for slot, scale in ((0, implied(0.5)), (2, 1.0)):
        book.prime(slot, torch.tensor(bad, dtype=dtype, device=device))
        assert book.scale(slot).item() == scale
        book.update()
        assert book.scale(slot).item() == scale


def test_priming_forgets_what_was_seen_before(device: torch.device) -> None:
    """The tensor jumped; its old maximum belongs to the old one."""
    book = book_of(1, device)
    book.seen(0).copy_(bits(1e6))
    book.prime(0, torch.tensor(1.0, device=device))
    book.update()
    assert book.scale(0).item() == implied(1.0)


def test_units_are_cleared_with_what_was_seen(device: torch.device) -> None:
    book = book_of(1, device)
    for unit in range(3):
        book.unit(unit).fill_(unit + 1)
    book.update()
    assert [book.unit(unit).item() for unit in range(3)] == [0, 0, 0]
    assert book_of(0, device).snapshot() == {}


def test_addresses_and_alignment_stay(device: torch.device) -> None:
    """CUDA graphs hold them, and cuBLASLt wants scales at multiples of 16 bytes."""
    book = book_of(5, device)
    views = [view for slot in range(5) for view in (book.scale(slot), book.seen(slot), book.counts(slot))]
    assert [(view.numel(), view.dtype) for view in views[:3]] == [
        (1, torch.float32),
        (1, torch.int32),
        (2, torch.int64),
    ]
    assert all(view.data_ptr() % 16 == 0 for view in views)
    step(book, 1.0, 2.0, 3.0, 4.0, 5000.0)
    book.prime(2, torch.tensor(9.0, device=device))
    assert views[12].item() == implied(5000.0)
    assert views[6].item() == implied(9.0)


def test_copies_are_independent(device: torch.device) -> None:
    book = book_of(1, device)
    book.prime(0, torch.tensor(1.0, device=device))
    other = copy.deepcopy(book)
    assert other.primed(0)
    step(other, 1e4)
    other.counts(0).add_(1)
    assert book.scale(0).item() == implied(1.0)
    assert other.scale(0).item() == implied(1e4)
    assert book.counts(0).tolist() == [0, 0]


def test_a_book_moves_with_what_it_knows() -> None:
    book = book_of(2, torch.device("cpu"))
    step(book, 5.0, 6.0)
    assert book.to("meta") is book
    assert book.device == torch.device("meta")
    assert book.scale(1).device == torch.device("meta")


def test_the_snapshot_is_for_people(device: torch.device) -> None:
    book = ScaleBook([Slot(name="a"), Slot(name="b", margin=1)], device)
    step(book, 3.0, 3.0)
    step(book, 2.0, 0.0)
    book.counts(1).copy_(torch.tensor([4, 7]))
    assert book.snapshot() == {
        "a": {"scale": 2.0**-7, "amax": 3.0, "saturated": 0, "underflowed": 0},
        "b": {"scale": 2.0**-6, "amax": 3.0, "saturated": 4, "underflowed": 7},
    }


def test_a_book_made_in_inference_mode_can_be_used_outside() -> None:
    with torch.inference_mode():
        book = book_of(1, torch.device("cpu"))
    step(book, 3.0)
    book.prime(0, torch.tensor(4.0))
    assert book.scale(0).item() == implied(4.0)


@pytest.mark.parametrize(
    "slots",
    [
        [Slot(name="a"), Slot(name="a")],
        [Slot(name="a", largest=0.0)],
        [Slot(name="a", largest=math.nan)],
        [Slot(name="a", margin=25)],
    ],
)
def test_slots_that_make_no_sense_are_refused(slots: list[Slot]) -> None:
    with pytest.raises(ValueError, match="a"):
        ScaleBook(slots, "cpu")
