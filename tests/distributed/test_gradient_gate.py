import re

import pytest
import torch
from ranks import on_ranks
from test_gradient_wire import error, exact_mean, gradients, wrapped
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from towers import loss_of, rows, tower

from loka.core.exceptions import LokaError, PlanMismatch
from loka.core.records.report import HP
from loka.distributed import choose_gradients
from loka.distributed.choice import time_in_turns
from loka.distributed.gradient_gate import STEPS

WIDE = 128
# Microseconds on the first rank and on the second.
CLOCKS = {HP: (100.0, 110.0), "int8": (50.0, 120.0), "e4m3": (90.0, 80.0)}


def clock(rank):
    def timer(ways, device):
        for run in ways.values():
            run()
        return {name: [CLOCKS[name][rank] + 0.01 * i for i in range(11)] for name in ways}

    return timer


def stepping(model, rank, scale=1.0):
    def step(number):
        model.zero_grad()
        (scale * loss_of(model, *rows(number, rank, WIDE))).backward()

    return step


def single():
    torch.manual_seed(0)
    return nn.Linear(WIDE, 64, bias=False)


class Faint(nn.Module):
    """Every other column of the first weight has gradients 2000 times smaller than the ones beside it."""

    def __init__(self):
        super().__init__()
        self.tower = tower(WIDE, 64, 1)

    def forward(self, x):
        return self.tower(x * torch.tensor([1.0, 5e-4]).repeat(WIDE // 2))


def on_rank(rank, folder):
    found = {}
    for engine in ("ddp", "fsdp2"):
        model = wrapped(engine, None)
        choice = choose_gradients(model, stepping(model, rank), timer=clock(rank))
        stepping(model, rank)(0)
        exact = exact_mean(2)
        away = {name: error(grad, exact[name]) for name, grad in gradients(model).items()}
        found[engine] = {"taken": choice.taken, "told": str(choice), "away": away}
    made = {"single": single(), "faint": Faint(), "tiny": Faint(), "by time": single(), "own": single()}
    models = {name: DistributedDataParallel(model) for name, model in made.items()}
    tiny = stepping(models["tiny"], rank, 2.0**-60)
    found["tiny"] = str(choose_gradients(models["tiny"], tiny, codecs=["int8", "e4m3"], timer=clock(rank)))
    for name, timer in (("single", clock(rank)), ("faint", clock(rank)), ("by time", time_in_turns)):
        step = stepping(models[name], rank)
        codecs = ["int8", "e4m3"] if name == "faint" else ["int8"]
        found[name] = str(choose_gradients(models[name], step, codecs=codecs, timer=timer))
    for name in ("single", "own"):
        stepping(models[name], rank)(0)
    found["as torch sends"] = torch.equal(made["single"].weight.grad, made["own"].weight.grad)
    return {**found, "refused": refused(rank)}


def refused(rank):
    told = {}
    for name in ("zero", "nan", "nothing", "sparse"):
        inner = nn.Embedding(8, 8, sparse=True) if name == "sparse" else single()
        model = DistributedDataParallel(inner)

        def step(number, name=name, model=model):
            if name != "nothing":
                x = rows(number, rank, WIDE)[0] * {"zero": 0.0, "nan": torch.nan}[name]
                model(x if rank else x.nan_to_num()).square().mean().backward()

        with pytest.raises(LokaError) as raised:
            choose_gradients(model, step)
        told[name] = str(raised.value)
    model = DistributedDataParallel(single())
    for name, one in (("codecs", model), ("wrapped", model if rank else single())):
        with pytest.raises(PlanMismatch) as raised:
            choose_gradients(one, lambda number: None, codecs=["int8" if name == "wrapped" or rank else "e4m3"])
        told[name] = str(raised.value)
    return told


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return on_ranks(on_rank, 2, tmp_path_factory.mktemp("gate"))


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_one_decision_by_the_slower_ranks_times(two, engine):
    """INT8 is the faster on the first rank and the slower on the second; matrices then travel by e4m3."""
    first, second = (found[engine] for found in two)
    assert first["taken"] == second["taken"] == ("e4m3",)
    assert first["told"] == second["told"]
    assert "not faster by time" in first["told"]
    for name, away in first["away"].items():
        assert (away < 1e-6) if name.endswith("bias") else (0.002 < away < 0.04)


def test_shares_are_those_of_the_equation(two):
    """One weight [64, 128], whose rows are the codec's blocks: INT8 rounds each rank's, and their mean."""
    model, parts = single(), []
    for number in range(STEPS):
        for rank in range(2):
            stepping(model, rank)(number)
            parts.append(model.weight.grad.double().clone())
    sent = torch.stack(parts).view(STEPS, 2, 64, WIDE)

    def rounded(x):
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale).round() * scale

    mean = sent.mean(1)
    errors, sizes = (rounded(rounded(sent).mean(1)) - mean).square().sum(0), mean.square().sum(0)
    share, l2 = (errors / (errors + sizes)).mean(), (errors.sum() / sizes.sum()).sqrt()
    for found in two:
        for name in ("single", "by time"):
            assert found[name].splitlines()[1].split()[:4] == ["int8", f"{l2:.4f}", f"{share:.2%}", "weight"]
        assert "as torch sends them" in found["single"]
        assert found["as torch sends"]


def test_gradients_whose_squares_float32_does_not_hold_have_the_same_shares(two):
    for found in two:
        shares = [float(found[name].splitlines()[1].split()[2].strip("%")) for name in ("tiny", "faint")]
        assert shares[0] == pytest.approx(shares[1])


def test_numbers_that_vanish_beside_others_are_not_admitted(two):
    _, int8, e4m3, _ = two[0]["faint"].splitlines()
    assert re.search(r" [12]\d\.\d\d%  tower.0.weight .*- +its error is more than 1% of", int8)
    assert " 0." in e4m3
    assert " 90 " in e4m3


def test_what_cannot_be_decided_is_refused_on_all_ranks(two):
    for found in two:
        for name in ("zero", "nan", "nothing"):
            assert "not finite, or zeros, or none came" in found["refused"][name]
        assert "rank 0: e4m3\n  rank 1: int8" in found["refused"]["codecs"]
        assert "rank 0: the model is neither in DistributedDataParallel" in found["refused"]["wrapped"]
        assert "gradients of tables of the model are sparse" in found["refused"]["sparse"]
    with pytest.raises(LokaError, match="one rank sends no gradients"):
        choose_gradients(single(), lambda number: None)
