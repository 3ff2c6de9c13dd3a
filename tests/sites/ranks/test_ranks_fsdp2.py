"""FSDP2 on two ranks, a unit for the model or for each layer, before and after `convert`: one plan fits all.

The rows of a batch lie half on each rank. A row's scale is its own, so `output` and `grad_input` are those of
one process; `grad_weight` quantizes the columns of each rank's half. One process that takes the halves one
after the other does the same arithmetic, up to the one addition that makes two ranks' gradients one: the
losses agree within the rounding of float32. Against one batch of all rows the bound is derived below.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from rank_models import (
    LR,
    SITES,
    STEPS,
    adamw,
    bare_plan,
    by_halves,
    forced,
    left,
    loss_of,
    mixed,
    on_rank,
    planned,
    probed,
    rows,
    runs,
    sgd,
    train,
)
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import ParametrizationList

import loka
from loka.core.records.plan import Plan
from loka.nn.site import Site

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
UNITS, ORDERS = ("root", "layer"), ("convert first", "shard first")
# Eight roundings of float32 in a loss near 0.7: sums over halves, their mean, what an update moves by them.
ROUNDING = 8 * 0.7 * 2**-24

# Their parents read their parameters.
NOT_CALLED = (nn.ParameterList, ParametrizationList, nn.modules.linear.NonDynamicallyQuantizableLinear)


def shard(model, units):
    """A unit for all, or one for each layer that is called and multiplies by parameters of its own."""
    mesh = init_device_mesh("cpu", (2,))
    if units == "layer":
        for module in list(model.modules()):
            held = [module, *(c for c in module.children() if isinstance(c, nn.ParameterList))]
            if not isinstance(module, NOT_CALLED) and any([*one.parameters(recurse=False)] for one in held):
                fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@dataclass(frozen=True)
class Job:
    plan: Plan

    def __call__(self, rank, folder):
        found = {}
        for units in UNITS:
            for order in ORDERS:
                for make in (sgd, adamw):
                    found[f"{units}, {order}, {make.__name__}"] = self.trained(rank, units, order, make)
        return {**found, "normed": self.normed(), "frozen": self.evaluated()}

    def sharded(self, units, order):
        model = mixed()
        if order == "convert first":
            return shard(loka.convert(model, self.plan), units)
        return loka.convert(shard(model, units), self.plan)

    def trained(self, rank, units, order, make, backend=None):
        keys = list(mixed().state_dict())
        model = self.sharded(units, order)
        called = model if backend is None else torch.compile(model, backend=backend)
        losses = on_rank(called, model.parameters(), rank, make)
        weight = model.bottom.weight
        found = {"losses": losses, "runs": runs(model), "keys": list(model.state_dict()) == keys}
        found["sharded"] = isinstance(weight, DTensor)
        found["weights"] = {
            name: parameter.full_tensor().detach().numpy() for name, parameter in model.named_parameters()
        }
        classes = [type(module).__name__ for module in model.modules()]
        loka.revert(model)
        found["left"] = left(model)
        found["classes"] = classes == [type(module).__name__ for module in model.modules()]
        found["is fsdp"] = isinstance(model, FSDPModule)
        found["reverted"] = loss_of(model, *rows(9)).item()
        return found

    def normed(self):
        """What another library does to a converted layer, after it was sharded or in its place."""
        model = loka.convert(mixed(), self.plan)
        weight_norm(model.bottom)
        shard(model, "layer")
        loss_of(model, *rows(0)).backward()
        count = runs(model)
        loka.revert(model)
        return {
            "runs": count,
            "left": left(model),
            "loss": loss_of(model, *rows(0)).item(),
            "parametrized": hasattr(model.bottom, "parametrizations"),
        }

    def evaluated(self):
        model = self.sharded("layer", "convert first").eval()
        with torch.no_grad():
            return model(rows(0)[0]).tolist()


@dataclass(frozen=True)
class Compiled(Job):
    def __call__(self, rank, folder):
        cases = (("root", "convert first"), ("layer", "shard first"))
        return {f"{units}, {order}, sgd": self.trained(rank, units, order, sgd, "aot_eager") for units, order in cases}


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    return on_ranks(Job(bare_plan()), 2, tmp_path_factory.mktemp("eager"))


def check(rank, found, units, make):
    expected = [losses[rank] for losses in by_halves(bare_plan(), make, apart=units == "layer")]
    assert found["losses"] == pytest.approx(expected, abs=ROUNDING, rel=0)
    assert set(found["runs"]) == planned(bare_plan())
    assert {site.rpartition("/")[0] for site in found["runs"]} == SITES
    for site, count in found["runs"].items():
        parts = 3 if units == "layer" and "in_proj" in site else 1  # FSDP2 hands one input over as three
        assert count == parts * STEPS, site
    assert found["keys"]
    assert found["sharded"]
    assert not found["left"]
    assert found["classes"]
    assert found["is fsdp"]


@pytest.mark.parametrize("make", [sgd, adamw], ids=["sgd", "adamw"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("units", UNITS)
def test_two_ranks_train_as_one_process(eager, units, order, make):
    for rank in range(2):
        check(rank, eager[rank][f"{units}, {order}, {make.__name__}"], units, make)


@pytest.mark.slow  # tests/distributed has regions under FSDP2 in every run
def test_compiled(tmp_path):
    found = on_ranks(Compiled(bare_plan()), 2, tmp_path)
    for rank in range(2):
        for case, one in found[rank].items():
            check(rank, one, case.partition(",")[0], sgd)


@pytest.mark.parametrize("units", UNITS)
def test_what_is_left_after_revert_is_the_plain_model(eager, units):
    """R1: the weights of the run, in a model that LoKA never saw."""
    for rank in range(2):
        found = eager[rank][f"{units}, shard first, sgd"]
        plain = mixed()
        plain.load_state_dict({name: torch.from_numpy(weight) for name, weight in found["weights"].items()})
        assert found["reverted"] == pytest.approx(loss_of(plain, *rows(9)).item(), abs=ROUNDING, rel=0)


def test_revert_after_weight_norm_and_sharding(eager):
    plain = mixed()
    weight_norm(plain.bottom)
    for rank in range(2):
        found = eager[rank]["normed"]
        assert set(found["runs"]) == planned(bare_plan())
        assert all(found["runs"].values())
        assert not found["left"]
        assert found["parametrized"]
        assert found["loss"] == pytest.approx(loss_of(plain, *rows(0)).item(), abs=ROUNDING, rel=0)


def test_evaluation_gives_the_outputs_of_one_process(eager):
    model = loka.convert(mixed(), bare_plan()).eval()
    with torch.no_grad():
        expected = model(rows(0)[0]).tolist()
    for rank in range(2):
        assert eager[rank]["frozen"] == pytest.approx(expected, abs=ROUNDING)


def test_a_batch_of_all_rows_within_the_bound_of_grad_weight(eager, monkeypatch):
    """An e4m3 value is within u = 2^-4 of itself, or within 2^-10 of a scale that is amax / 448. So

        |dW^ - dW| <= r |dY| |X|,   r = 2 u + u^2 + 2^-9,   for all rows, and by Cauchy-Schwarz for two halves

    and one update of SGD moves the two apart by 2 lr r |dY| |X| at most; sites add up as the root of squares.
    To first order a loss differs by its gradient times what the weights differ by; twice that leaves room
    for the curvature, and for weights that round to another side.
    """
    products = {}
    real = Site.__call__

    def watched(self, x, weight):
        y = real(self, x, weight)
        norm = x.detach().norm().item()
        y.register_hook(lambda dy: products.setdefault(self.name, []).append(dy.norm().item() * norm))
        return y

    monkeypatch.setattr(Site, "__call__", watched)
    model = loka.convert(mixed(), bare_plan())
    slopes = []

    def parts(step):
        slopes.append(0.0)
        return [rows(step)]

    optimizer = sgd(model.parameters())
    optimizer.register_step_pre_hook(
        lambda *_: slopes.__setitem__(-1, math.hypot(*(p.grad.norm().item() for p in model.parameters())))
    )
    whole = [loss for (loss,) in train(model, optimizer, parts)]
    r, apart = 2 * 2**-4 + 2**-8 + 2**-9, 0.0
    for step in range(STEPS):
        bound = 2 * slopes[step] * apart + ROUNDING
        for units in UNITS:
            two = [eager[rank][f"{units}, convert first, sgd"]["losses"][step] for rank in range(2)]
            assert abs(sum(two) / 2 - whole[step]) <= bound
        apart += LR * 2 * r * math.hypot(*(per_step[step] for per_step in products.values()))
    assert bound < 0.2, "a bound that anything passes says nothing"


def test_attention_whose_input_comes_as_three_tensors_fits_either_plan():
    """Probed within FSDP2 it is three sites, and without it one: both plans run all of theirs in both."""
    three = mixed()
    three.apart = True
    plans = {"one": bare_plan(), "three": forced(probed(three))}
    parts = {f"attention.in_proj_weight.chunk(3)[{part}]" for part in range(3)}
    assert set(plans["three"].model.layers) == SITES - {"attention.in_proj_weight"} | parts
    for plan in plans.values():
        for apart in (False, True):
            model = mixed()
            model.apart = apart
            loka.convert(model, plan)
            loss_of(model, *rows(0)).backward()
            assert all(runs(model).values())
            assert set(runs(model)) == planned(plan)
