"""DCN-V2 of the zoo through the whole loop: probe, measure, plan, convert, train, revert."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import loka
from loka.core.error import Estimate, sqnr_db
from loka.core.exceptions import NotConverted
from loka.core.plan import Plan
from loka.core.report import Measurement, Report
from loka.kernels.run import kernel_runs, reset_kernel_runs
from loka.nn.chain import running_chains
from loka.nn.cross import running_crosses
from loka.probe import Settings
from loka.zoo import build

pytestmark = pytest.mark.usefixtures("forced_fusion")

INSIDE = [f"cross.{layer}.{part}" for layer in (0, 1) for part in "vu"]


def batch(seed: int, rows: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(rows, 13, generator=generator)
    return dense, torch.randint(0, 50, (rows, 6), generator=generator)


def step(model: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    """Logits and the gradients of the cross layers."""
    model.zero_grad()
    logits = model(*batch(seed))
    nn.functional.softplus(-logits).mean().backward()
    return {
        "logits": logits.detach(),
        **{
            name: p.grad
            for name, p in model.named_parameters()
            if name.startswith("cross") and p.grad is not None
        },
    }


def dcn() -> nn.Module:
    torch.manual_seed(0)
    return build("dcnv2", dense_features=13, vocab_sizes=[50] * 6, size="small")


@pytest.fixture(scope="module")
def stats() -> loka.Stats:
    model = dcn()
    with loka.Probe(model, every=1) as probe:
        for seed in range(2):
            step(model, seed)
    return probe.stats()


@pytest.fixture(scope="module")
def report(stats: loka.Stats) -> Report:
    names = ["emulated:rowwise_e4m3", "emulated:tensorwise_e4m3"]
    return loka.measure(stats, device="cpu", candidates=names, settings=Settings(max_draws=4))


def test_the_whole_loop(stats: loka.Stats, report: Report, tmp_path: Path) -> None:
    (stack,) = stats.crosses
    assert stack.paths == ("cross.0", "cross.1")
    assert stack.joint
    assert not {path for chain in stats.chains for path in chain.linears} & set(INSIDE)
    assert report.crosses == stats.crosses
    plan = loka.plan(report, loka.Budget(chains="always"))
    assert list(plan.crosses) == ["cross.0"]
    plan.save(tmp_path / "plan.json")

    model = dcn()
    plain, keys = copy.deepcopy(model), list(model.state_dict())
    wanted = step(plain)
    loka.convert(model, Plan.load(tmp_path / "plan.json"))
    assert list(model.state_dict()) == keys
    assert list(running_crosses(model)) == ["cross.0"]
    assert running_crosses(model)["cross.0"].reader is running_chains(model)["deep.0"]
    states = {id(running.state) for running in running_chains(model).values()}
    assert states == {id(running_crosses(model)["cross.0"].state)}, "one book and one bank"
    with pytest.raises(NotConverted):
        loka.convert(model, plan)
    for _ in range(2):
        reset_kernel_runs()
        got = step(model)
    decibels = {name: sqnr_db(got[name], wanted[name]) for name in wanted}
    # All linear layers but the logit run in FP8: beside the 7.7 sources of tests/nn/test_cross_layers.py a
    # gradient has two of each of the deep part's three GEMMs in backward, and as many by way of the norms and
    # activations that forward came through: 31.5 - 10 log10(7.7 + 12) = 18.6.
    assert min(decibels.values()) >= 18, decibels
    linears = len(stats.model.layers) - 1
    assert kernel_runs()["emulated:tensorwise_e4m3", "grad_weight"] == linears
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for seed in range(6):
        losses.append(nn.functional.softplus(-step(model, seed % 2)["logits"]).mean().item())
        optimizer.step()
    assert losses[-1] < losses[0]
    with torch.no_grad():
        apart = model(*batch(0))
        assert torch.equal(model.eval()(*batch(0)), apart), "the deep part is served with the cross layers"
    model.train()

    model.load_state_dict(plain.state_dict())
    loka.revert(model)
    assert not running_crosses(model)
    for name, value in step(model).items():
        assert torch.equal(value, wanted[name]), name


def test_resuming_keeps_the_stacks(stats: loka.Stats, tmp_path: Path) -> None:
    stats.save(tmp_path)
    loaded = loka.Stats.load(tmp_path)
    assert loaded.digest() == stats.digest()
    with loka.Probe(dcn(), resume=loaded) as probe:
        pass
    assert probe.stats().crosses == stats.crosses


def test_two_probes_find_the_same() -> None:
    model = dcn()
    with loka.Probe(model) as first, loka.Probe(model) as second:
        step(model)
    assert first.stats().crosses == second.stats().crosses
    assert first.stats().crosses


def timed(report: Report, microseconds: float) -> Report:
    def measured(value: float) -> Measurement:
        speedup = 100.0 / value
        return Measurement(
            microseconds=Estimate(value, value, value), speedup=Estimate(speedup, speedup, speedup)
        )

    times = {"hp": measured(100.0), "fused:e4m3_row": measured(microseconds)}
    return replace(report, chain_times={"cross.0": times})


@pytest.mark.parametrize(
    ("budget", "microseconds", "why"),
    [
        (loka.Budget(), None, "it was not timed"),
        (loka.Budget(), 120.0, "is below"),
        (loka.Budget(chains="always", min_sqnr_db=60.0), None, "sqnr_db"),
        (loka.Budget(chains="always", chain_recipes=("e4m3_tensor",)), None, "by the recipe e4m3_row only"),
        (loka.Budget(chains="always", keep=("cross.1.u",)), None, "kept by"),
        (loka.Budget(chains="never"), None, None),
    ],
)
def test_what_keeps_a_stack_in_parts(
    report: Report, budget: loka.Budget, microseconds: float | None, why: str | None
) -> None:
    plan = loka.plan(report if microseconds is None else timed(report, microseconds), budget)
    assert not plan.crosses
    notes = [note for note in plan.notes if note.startswith("stack of cross layers at cross.0")]
    assert [why in note for note in notes] == ([] if why is None else [True])


def test_a_stack_that_is_faster_as_a_whole(report: Report) -> None:
    plan = loka.plan(timed(report, 50.0))
    decided = plan.crosses["cross.0"]
    assert decided.reason == "fastest as a whole"
    assert decided.microseconds.value == 50.0
    assert decided.hp_microseconds.value == 100.0
