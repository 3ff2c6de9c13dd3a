"""FSDP2 with FP8 gathers against one process whose weights are quantized alike: 2 to 4 ranks over gloo.

Emulated GEMMs multiply the same numbers whatever the scales are split into, so outputs of a rank are those of
one process bit for bit as long as the master weights are. Those get the sum of the ranks' gradients in
another order than autograd adds them, so from the second step on losses agree within roundings of float32.
"""

import contextlib
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from gather_jobs import NAMES, shard, trained
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode
from towers import LR, STEPS, alone, as_gathered, loss_of, plan_of, rows, tower, uneven

import loka
from loka.core.exceptions import NotConverted, PlanMismatch
from loka.distributed import fp8_all_gather
from loka.distributed.fp8_all_gather import Exchange, _unplanned
from loka.kernels.quantize.fp8_weights import room_for_rows
from loka.nn.site import site_forwards

# A step of Adam moves a weight by LR in the direction of its gradient, whatever its size, so the last bit of
# a sum decides little but near zero; eight roundings of float32 in a loss near 1, which three steps of 0.01
# may double.
ROUNDING = 2 * 8 * 2**-24


class Counting(DefaultAllGather):
    def __init__(self):
        self.sent = []

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.sent.append(input_tensor.numel() * input_tensor.element_size())
        return super().__call__(output_tensor, input_tensor, group, async_op)


def whole(model):
    return [p.full_tensor().detach() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


@dataclass(frozen=True)
class Job:
    plan: loka.Plan
    of_wide: loka.Plan

    def __call__(self, rank, folder):
        found = {f"{order}, {units}": self.equal(rank, order, units) for order, units in CASES}
        found |= {"kept": self.kept(rank), "bytes": self.bytes_of(), "parts": self.parts(rank)}
        found |= {
            "written": self.written(rank),
            "refused": self.refused(rank),
            "no scale": self.not_finite(rank),
            "watched": self.watched(rank),
        }
        return found

    def made(self, order="convert first", units="layer", **options):
        model = uneven()
        if order == "convert first":
            return shard(loka.convert(model, self.plan), units, **options)
        return loka.convert(shard(model, units, **options), self.plan)

    def equal(self, rank, order, units):
        model = self.made(order, units)
        keys = list(model.state_dict())
        gathering = fp8_all_gather(model, self.plan)
        losses = trained(model, rank)
        plain = {type(p.to_local()) for p in model.parameters()} | {
            type(v.to_local()) for v in model.state_dict().values()
        }
        found = {
            "losses": losses,
            "weights": [w.tolist() for w in whole(model)],
            "fp8": gathering.in_fp8,
            "plain": plain == {torch.Tensor},
            "keys": list(model.state_dict()) == keys,
            "runs": [count["runs"] for count in loka.health_of(model).values()],
        }
        gathering.remove()
        loka.revert(model)
        with torch.no_grad():
            found["reverted"] = loss_of(model, *rows(9, 0, 24)).item()
        return found

    def kept(self, rank):
        model = self.made(reshard_after_forward=False)
        fp8_all_gather(model, self.plan)
        return trained(model, rank)

    def gathering(self):
        model = self.made()
        fp8_all_gather(model, self.plan)
        return model

    def bytes_of(self):
        """Of each rank, in a forward and a backward of wide layers, against FSDP2's own bf16 gather."""
        sent = {}
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for how in ("bf16", "fp8"):
            model = shard(loka.convert(wide(), self.of_wide), mp_policy=mixed)
            gathering = fp8_all_gather(model, self.of_wide, filter=lambda name, how=how: how == "fp8")
            counting = Counting()
            for unit in [model, *(m for m in model.modules() if isinstance(m, nn.Linear))]:
                unit.set_custom_all_gather(counting)
            x, y = rows(0, 0, 128)
            loss_of(lambda x, model=model: model(x).float(), x, y).backward()
            sent[how] = sum(counting.sent)
            sent[f"{how} told"] = 2 * gathering.wire_bytes
        return sent

    def parts(self, rank):
        model = self.gathering()
        trained(model, rank, 1)
        with torch.no_grad():
            return model[0](rows(7, 0, 24)[0]).flatten().tolist()

    def written(self, rank):
        """Weights written past autograd and optimizer: scales are those of the numbers as they are."""
        model = self.gathering()
        trained(model, rank, 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().data.mul_(5.0)
            return model(rows(7, 0, 24)[0]).flatten().tolist()

    def refused(self, rank):
        model = self.made(units="root")
        gathering = fp8_all_gather(model, self.plan)
        told = {"table": str(gathering)}
        with pytest.raises(NotConverted, match="gathers in FP8 already"):
            fp8_all_gather(model, self.plan)
        loka.revert(model)
        with pytest.raises(NotConverted, match="remove\\(\\)"):
            model(rows(0, 0, 24)[0])
        with pytest.raises(NotConverted, match="remove\\(\\)"):  # a forward that failed does not count as under way
            model(rows(0, 0, 24)[0])
        with pytest.raises(NotConverted, match=r"loka\.convert"):
            fp8_all_gather(shard(uneven()), self.plan)
        with pytest.raises(PlanMismatch) as raised:
            fp8_all_gather(self.made(), self.plan, filter=lambda name: rank == 0 or name != "2.weight")
        with pytest.raises(PlanMismatch, match=r"rank 0: it can(.|\n)*rank 1: no site of this model runs by a plan"):
            fp8_all_gather(shard(uneven()) if rank == 1 else self.made(), self.plan)
        dist.barrier()  # all ranks raised, and none is left in a collective
        told["ranks"] = str(raised.value)
        return told

    def watched(self, rank):
        """Backward under a mode that sees ops, as counters of FLOPs and selective checkpoints are."""
        found = {}
        for name, mode in (("plain", contextlib.nullcontext()), ("watched", FlopCounterMode(display=False))):
            model = self.gathering()
            with mode:
                loss_of(model, *rows(0, rank, 24)).backward()
            found[name] = [p.grad.full_tensor().tolist() for p in model.parameters()]
        return found

    def not_finite(self, rank):
        """A NaN in the rows of one rank makes the weight NaN on all, and is flagged there."""
        model = self.gathering()
        if rank == 1:
            with torch.no_grad():
                model[2].weight.to_local()[0, 0] = torch.nan
        with torch.no_grad():
            y = model(rows(0, 0, 24)[0])
        return {"nan": bool(y.isnan().all()), "bad": loka.health_of(model)["2/output"]["bad_b"]}


CASES = [("convert first", "layer"), ("shard first", "root")]


def wide():
    return tower(128, 200, 160)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return on_ranks(Job(plan_of(uneven), plan_of(wide)), 3, tmp_path_factory.mktemp("three"))


@pytest.fixture(scope="module")
def expected():
    model = loka.convert(uneven(), plan_of(uneven))
    return alone(model, NAMES, 3), model


@pytest.mark.slow
def test_three_ranks_train_what_one_process_does(three, expected):
    losses, _ = expected
    for order, units in CASES:
        for rank, found in enumerate(three):
            case = found[f"{order}, {units}"]
            assert set(case["fp8"]) == NAMES
            own = [each[rank] for each in losses]
            assert case["losses"][0] == own[0], "the first step has the same master weights"
            assert case["losses"] == pytest.approx(own, abs=ROUNDING, rel=0)
            assert case["plain"]
            assert case["keys"]
            assert case["runs"] == [STEPS] * 11  # the first layer's input wants no gradient


def test_weights_stay_what_they_are_outside_of_forward(three, expected):
    """Master weights: those of one process; after remove and revert the model is the plain one."""
    _, model = expected
    plain = uneven()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        reverted = loss_of(plain, *rows(9, 0, 24)).item()
    for found in three:
        for order, units in CASES:
            case = found[f"{order}, {units}"]
            for mine, theirs in zip(case["weights"], model.parameters(), strict=True):
                torch.testing.assert_close(torch.tensor(mine), theirs.detach(), atol=2 * LR * 1e-3, rtol=0)
            assert case["reverted"] == pytest.approx(reverted, abs=1e-3)


def test_weights_that_stay_gathered_for_backward(three):
    for found in three:
        assert found["kept"] == found["convert first, layer"]["losses"]


def test_bytes_on_the_wire(three):
    """Biases travel in bf16, and rows are padded to the same number on each rank."""
    for found in three:
        sent = found["bytes"]
        assert sent["fp8"] <= 0.51 * sent["bf16"]
        assert sent["fp8"] == sent["fp8 told"]
        assert sent["bf16"] == sent["bf16 told"]


def test_a_mode_that_watches_ops_changes_nothing(three):
    for found in three:
        assert found["watched"]["watched"] == found["watched"]["plain"]


@pytest.mark.parametrize("what", ["parts", "written"])
def test_scales_are_of_the_weights_as_they_are(three, what):
    """In a part that is called by itself after an update, and after a write that no version counter sees."""
    model = loka.convert(uneven(), plan_of(uneven))
    alone(model, NAMES, 3, steps=1)
    with torch.no_grad():
        if what == "written":
            for parameter in model.parameters():
                parameter.mul_(5.0)
        with as_gathered(model, NAMES):
            part = model[0] if what == "parts" else model
            y = part(rows(7, 0, 24)[0]).flatten()
    for found in three:
        torch.testing.assert_close(torch.tensor(found[what]), y, atol=1e-5, rtol=1e-4)


def test_what_cannot_be_is_refused_on_all_ranks(three):
    for found in three:
        assert "0.bias" in found["refused"]["table"]
        assert "it is no matrix" in found["refused"]["table"]
        assert (
            "rank 1: 2.weight: not in FP8 (left out by the filter), and in FP8 on rank 0" in found["refused"]["ranks"]
        )
        assert found["no scale"] == {"nan": True, "bad": True}


def test_weights_that_are_renewed_one_by_one_have_the_bytes_of_all_at_once(monkeypatch):
    """By their new maxima: bytes by an old one beside a new scale are other weights."""
    monkeypatch.setattr(dist, "all_reduce", lambda *given, **named: None)
    weights = [torch.randn(16, 16, generator=torch.Generator().manual_seed(0)) * 2.0**power for power in (0, 5)]

    def renewed(*several):
        made = Exchange.__new__(Exchange)
        made.chosen, made._group = [SimpleNamespace(padded=weight) for weight in weights], None
        made._weight_of = torch.tensor([0, 1]).repeat_interleave(16)
        made._scales, made._largest = torch.ones(32), torch.ones(2)
        made._bytes = [room_for_rows(weight) for weight in weights]
        made._hooks = [SimpleNamespace(scale=scale) for scale in made._scales.split(16)]
        for which in several:
            made.agree_on_scales(which)
            made.quantize(which)
        return torch.cat([made._scales, *(each.flatten().float() for each in made._bytes)])

    assert torch.equal(renewed([1], [0]), renewed([0, 1]))


@pytest.mark.parametrize(
    ("recipe", "owners", "why"),
    [
        ("rowwise_e4m3_pow2", 1, None),
        ("rowwise_e4m3_pow2", 2, "several modules hold it"),
        ("rowwise_e4m3", 1, "wants other scales than powers of two"),
    ],
)
def test_which_weights_sites_read_as_they_are_gathered(recipe, owners, why):
    plan, model = plan_of(uneven, f"emulated:{recipe}"), uneven()
    forward = next(iter(site_forwards(loka.convert(model, plan)).values()))
    one = SimpleNamespace(size=forward.module.weight.shape, owners=[(forward.module, "weight")] * owners)
    told = _unplanned(one, {id(forward.module): forward}, plan)
    assert told is None if why is None else why in told
