"""FP8 copies of the weights: right, made once, and made again exactly when the weights changed."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import nn

from loka.core.exceptions import LokaError
from loka.core.recipe import Cast, Format, Granularity
from loka.core.reference import quantize
from loka.kernels import book as kernels
from loka.nn import weight_bank
from loka.nn.scale_book import ScaleBook, Slot
from loka.nn.weight_bank import WeightBank

E4M3 = Cast(Format.E4M3, Granularity.TENSOR)
SHAPES = {"a": (48, 80), "b": (17, 33), "c": (1, 1), "d": (80, 48), "e": (3, 40)}


def weights_of(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {
        name: nn.Parameter((torch.randn(shape) * 2.0 ** -len(name)).to(device, dtype))
        for name, shape in SHAPES.items()
    }


def bank_of(weights: dict[str, nn.Parameter], *, first_slot: int = 0) -> WeightBank:
    slots = [Slot(name=f"before{place}") for place in range(first_slot)]
    slots += [Slot(name=name) for name in weights]
    device = next(iter(weights.values())).device
    return WeightBank(weights, ScaleBook(slots, device), first_slot)


def implied(weight: torch.Tensor) -> float:
    return 2.0 ** math.ceil(math.log2(weight.abs().max().item() / 448.0))


def check_copies(bank: WeightBank) -> None:
    """Both copies are the reference's quantization under the scale that the bank names."""
    for name, weight in bank.weights.items():
        cpu = weight.detach().cpu()
        rows, columns = (-(-side // 16) * 16 for side in cpu.shape)
        twin = quantize(cpu, E4M3, padded=(rows, columns), scale=bank.scale(name).cpu()).data
        assert bank.row(name).shape == (rows, columns)
        assert torch.equal(bank.row(name).cpu().view(torch.uint8), twin.view(torch.uint8))
        assert torch.equal(bank.turned(name).cpu().view(torch.uint8), twin.view(torch.uint8).t())
        assert bank.turned(name).is_contiguous()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The Triton path, on a CPU through its interpreter; grids of the kernels that were launched."""
    pytest.importorskip("triton")
    from loka.kernels.triton import bank as fused

    grids: list[object] = []

    class Counted:
        def __init__(self, kernel: object) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: object) -> object:
            grids.append(grid)
            return self.kernel[grid]  # type: ignore[index]

    monkeypatch.setattr(fused, "_quantize_bank", Counted(fused._quantize_bank))
    monkeypatch.setattr(fused, "_update", Counted(fused._update))
    monkeypatch.setattr(kernels, "_on_triton", lambda tensor: True)
    return grids


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_copies_and_scales_after_the_first_refresh(dtype: torch.dtype, device: torch.device) -> None:
    bank = bank_of(weights_of(device, dtype), first_slot=2)
    bank.refresh()
    check_copies(bank)
    for name, weight in bank.weights.items():
        assert bank.scale(name).item() == implied(weight)
        assert bank.scale(name).data_ptr() == bank.book.scale(bank.slot(name)).data_ptr()
        seen = bank.book.seen(bank.slot(name)).view(torch.float32)
        assert seen.item() == weight.abs().max().item()
    assert bank.slot("a") == 2
    assert not bank.book.primed(0)


def test_scales_are_delayed_by_a_step(device: torch.device) -> None:
    """A weight that grows saturates for one step, is counted, and then has its scale."""
    weights = weights_of(device)
    bank = bank_of(weights)
    bank.book.counting = True
    bank.refresh()
    first = bank.scale("a").item()
    with torch.no_grad():
        weights["a"].mul_(16)
    bank.book.update()
    bank.refresh()
    assert bank.scale("a").item() == first
    check_copies(bank)
    saturated = (weights["a"].abs() / first > 448).sum().item()
    assert saturated > 0
    assert bank.book.counts(bank.slot("a"))[0].item() == saturated
    bank.book.update()
    bank.refresh()
    assert bank.scale("a").item() == implied(weights["a"]) == 16 * first
    check_copies(bank)
    assert bank.book.counts(bank.slot("a"))[0].item() == saturated


def test_a_nan_step_leaves_scales_as_they_were(device: torch.device) -> None:
    weights = weights_of(device)
    bank = bank_of(weights)
    bank.refresh()
    bank.book.update()
    before = {name: bank.scale(name).item() for name in weights}
    kept = weights["b"].detach().clone()
    with torch.no_grad():
        weights["b"][3, 5] = math.nan
    bank.refresh()
    bank.book.update()
    assert {name: bank.scale(name).item() for name in weights} == before
    assert bank.row("b").float().isnan().nonzero().tolist() == [[3, 5]]
    with torch.no_grad():
        weights["b"].copy_(kept)
    bank.refresh()
    check_copies(bank)


@pytest.mark.parametrize("bad", [0.0, math.nan])
def test_weights_without_a_maximum_get_scale_one_until_they_have(bad: float, device: torch.device) -> None:
    weights = {"zero": nn.Parameter(torch.full((20, 20), bad, device=device))}
    bank = bank_of(weights)
    bank.refresh()
    assert bank.scale("zero").item() == 1.0
    with torch.no_grad():
        weights["zero"].fill_(3e-5)
    bank.book.update()
    bank.refresh()
    bank.book.update()
    bank.refresh()
    assert bank.scale("zero").item() == implied(weights["zero"])
    check_copies(bank)


def test_strides_do_not_matter(device: torch.device) -> None:
    base = torch.randn(90, 70, generator=torch.Generator().manual_seed(0)).to(device)
    weights = {"turned": nn.Parameter(base.t()), "sliced": nn.Parameter(base[::2, 3:40])}
    assert not weights["turned"].is_contiguous()
    bank = bank_of(weights)
    bank.refresh()
    check_copies(bank)


def test_one_launch_for_five_weights(launches: list[object]) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights = weights_of(device)
    bank = bank_of(weights)
    for _ in range(2):
        launches.clear()
        bank.refresh()
        assert launches == [(2 + 1 + 1 + 2 + 1,)]  # tiles of 64 x 64
        launches.clear()
        bank.book.update()
        assert launches == [(1,)]
    for name, weight in weights.items():
        assert bank.scale(name).item() == implied(weight)
        dequantized = bank.row(name).float() * bank.scale(name)
        rows, columns = weight.shape
        # half a step of e4m3, or a whole one by the interpreter's cast
        off = (dequantized[:rows, :columns] - weight.float()).abs()
        assert (off <= weight.float().abs() * 2.0**-3 + bank.scale(name) * 2.0**-9).float().mean() > 0.95
        assert torch.equal(bank.turned(name).view(torch.uint8), bank.row(name).view(torch.uint8).t())


def test_one_launch_for_each_dtype(launches: list[object]) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights = weights_of(device)
    weights["b"].data = weights["b"].data.float()
    weights["e"].data = weights["e"].data.float()
    bank = bank_of(weights)
    bank.refresh()
    assert sorted(launches) == [(2,), (5,)]


def test_a_moved_weight_gets_a_new_table(launches: list[object]) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights = {"w": nn.Parameter(torch.full((16, 16), 2.0, device=device))}
    bank = bank_of(weights)
    bank.refresh()
    address = bank.row("w").data_ptr()
    old = weights["w"].data
    weights["w"].data = torch.full((16, 16), 3.0, device=device)
    assert bank.stale()
    bank.refresh()
    old.fill_(0)  # nothing reads it any more
    bank.refresh()
    assert (bank.row("w").float() * bank.scale("w") == 3.0).all()
    weights["w"].data = weights["w"].data.bfloat16()
    assert bank.stale()
    bank.refresh()
    assert (bank.row("w").float() * bank.scale("w") == 3.0).all()
    assert bank.row("w").data_ptr() == address


def test_stale_when_the_weights_changed_and_only_then(device: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 5)).to(device)
    bank = bank_of({"0": model[0].weight, "1": model[1].weight})
    assert bank.stale()
    bank.refresh()
    assert not bank.stale()
    for optimizer in (
        torch.optim.SGD(model.parameters(), lr=0.1, foreach=False),
        torch.optim.AdamW(model.parameters(), foreach=True),
        torch.optim.AdamW(model.parameters(), fused=True),  # raises no versions
    ):
        model(torch.randn(4, 20, device=device)).square().sum().backward()
        assert not bank.stale()
        optimizer.step()
        assert bank.stale()
        bank.refresh()
        check_copies(bank)
        assert not bank.stale()
        optimizer.zero_grad()
        assert not bank.stale()
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    assert bank.stale()
    bank.forget()
    bank.refresh()
    check_copies(bank)
    model[0].weight.data = model[0].weight.data.clone()
    assert bank.stale()
    bank.refresh()
    assert not bank.stale()
    model[0].weight.data = model[0].weight.data.view(-1).view(30, 20)  # same memory, same strides
    assert not bank.stale()
    with torch.no_grad():
        model[1].bias.add_(1)
    assert not bank.stale()


def test_stale_when_scales_moved_under_the_copies(device: torch.device) -> None:
    """A skipped optimizer step: the weights are the same, but the scale no longer fits the copies."""
    weights = weights_of(device)
    bank = bank_of(weights, first_slot=1)
    bank.refresh()
    with torch.no_grad():
        weights["a"].mul_(16)
    bank.refresh()
    assert not bank.stale()
    bank.book.update()
    assert bank.stale()
    bank.refresh()
    check_copies(bank)
    assert not bank.stale()
    bank.book.prime(0, torch.tensor(1.0, device=device))
    assert not bank.stale(), "another tensor's scale is nothing to the copies"


def test_forget_takes_scales_from_the_weights_again(device: torch.device) -> None:
    weights = weights_of(device)
    bank = bank_of(weights)
    bank.refresh()
    with torch.no_grad():
        weights["a"].mul_(2.0**-20)
    bank.forget()
    assert bank.stale()
    bank.refresh()
    assert bank.scale("a").item() == implied(weights["a"])
    check_copies(bank)
    bank.book.update()
    assert bank.scale("a").item() == implied(weights["a"])  # no old maximum is left in the ring
    bank.refresh()
    assert not bank.stale()


def test_a_captured_graph_makes_versions_worthless(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weights_of(torch.device("cpu"))
    bank, other, fresh = bank_of(weights), bank_of(weights), bank_of(weights)
    bank.refresh()
    other.refresh()
    with monkeypatch.context() as patch:
        patch.setattr(weight_bank, "capturing", lambda device: True)
        assert bank.stale()  # else the graph would hold no refresh
        bank.refresh()
        with pytest.raises(LokaError, match="outside the capture"):
            fresh.refresh()
        other.forget()
        with pytest.raises(LokaError, match="a, b, c, d, e"):
            other.refresh()
    assert bank.stale()
    bank.refresh()
    assert bank.stale()
    other.refresh()
    assert not other.stale()
    other.note_replay()
    other.refresh()
    assert other.stale()


def test_announced_replays_leave_versions_their_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between replays that are told, one refresh serves all that reads the weights."""
    bank = bank_of(weights_of(torch.device("cpu")))
    bank.refresh()
    with monkeypatch.context() as patch, weight_bank.announced_replays():
        patch.setattr(weight_bank, "capturing", lambda device: True)
        bank.refresh()
    assert bank.stale(), "the capture may have failed, and nothing of it has run"
    bank.refresh()
    assert not bank.stale()
    weight_bank.note_step()
    assert bank.stale()
    bank.refresh()
    assert not bank.stale()


@pytest.mark.gpu
def test_a_replayed_graph_updates_scales_and_copies() -> None:
    """Weights that double in the graph: each replay quantizes what the one before it left."""
    weights = weights_of(torch.device("cuda"))
    bank = bank_of(weights)
    bank.refresh()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        bank.book.update()
        assert bank.stale()
        bank.refresh()
        for weight in weights.values():
            weight.mul_(2.0)
    first = implied(weights["a"])
    for _ in range(20):
        graph.replay()
    assert bank.stale()
    with torch.no_grad():
        for weight in weights.values():
            weight.div_(2.0)
    check_copies(bank)  # of the last replay, without a refresh since
    assert bank.scale("a").item() == first * 2.0**18  # it quantized 2^19 times the weight


def test_copies_of_a_model_have_their_own_bank(device: torch.device) -> None:
    """By deepcopy, and through a file."""
    model = nn.Linear(20, 30, device=device)
    model.bank = bank_of({"weight": model.weight})
    model.bank.refresh()
    before = model.bank.row("weight").clone()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert other.bank.weights["weight"] is other.weight
        assert other.bank.stale()
        other.bank.refresh()
        assert torch.equal(other.bank.row("weight").view(torch.uint8), before.view(torch.uint8))
        with torch.no_grad():
            other.weight.fill_(3.0)
        other.bank.forget()
        other.bank.refresh()
        check_copies(other.bank)
        other.bank.book.update()
        assert torch.equal(model.bank.row("weight").view(torch.uint8), before.view(torch.uint8))
        assert not model.bank.stale()
        check_copies(model.bank)


def test_a_copied_bank_writes_through_no_old_table(launches: list[object]) -> None:
    """Even where its weight comes to lie where the first one's lies."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bank = bank_of({"w": nn.Parameter(torch.full((16, 16), 2.0, device=device))})
    bank.refresh()
    other = copy.deepcopy(bank)
    other.weights["w"].data = bank.weights["w"].data
    with torch.no_grad():
        other.weights["w"].fill_(0.5)
    other.refresh()
    assert (bank.row("w").float() * bank.scale("w") == 2.0).all()
    assert (other.row("w").float() * other.scale("w") == 0.5).all()


def test_weights_made_in_inference_mode_are_never_trusted() -> None:
    with torch.inference_mode():
        weight = torch.randn(20, 20)
    bank = WeightBank({"w": weight}, ScaleBook([Slot(name="w")], "cpu"))
    bank.refresh()
    check_copies(bank)
    assert bank.stale()


def test_weights_that_do_not_fit_are_refused() -> None:
    book = ScaleBook([Slot(name="w")], "cpu")
    for weight in (torch.ones(3), torch.ones(0, 3), torch.ones(2, 2, dtype=torch.float64)):
        with pytest.raises(ValueError, match="leave it out"):
            WeightBank({"w": weight}, book)
    with pytest.raises(ValueError, match="do not fit"):
        WeightBank({"w": torch.ones(2, 2)}, book, 1)
    with pytest.raises(ValueError, match="move both"):
        WeightBank({"w": torch.ones(2, 2, device="meta")}, book)
