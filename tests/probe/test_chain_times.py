"""Timing chains as a whole: what is built, and what becomes of a race."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import loka
from loka.core.chain_recipe import CHAIN_RECIPES
from loka.core.error import Estimate
from loka.core.exceptions import UnknownName
from loka.core.report import HP
from loka.core.timing import Race, Timing
from loka.probe import chain_times
from loka.probe.chain_times import build_chain, chain_key, time_chain
from loka.probe.settings import Settings

pytestmark = pytest.mark.usefixtures("forced_fusion")


@pytest.fixture(scope="module")
def stats() -> loka.Stats:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.RMSNorm(48), nn.Linear(48, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 48), nn.Linear(48, 1)
    )
    with loka.Probe(model, every=1) as probe:
        model(torch.randn(32, 48)).mean().backward()
    return probe.stats()


def test_what_is_built_computes_what_was_recorded(stats: loka.Stats) -> None:
    (chain,) = [chain for chain in stats.chains if not chain.lone]
    assert chain.paths == ("0", "1", "2", "3", "4")
    model, renamed, sites = build_chain(chain, torch.device("cpu"), torch.float32)
    assert [type(module) for module in model] == [nn.RMSNorm, nn.Linear, nn.LayerNorm, nn.GELU, nn.Linear]
    assert renamed.paths == ("0", "1", "2", "3", "4")
    assert sites["4/grad_weight"] == "4/grad_weight"
    assert model[1].bias is not None
    assert model[2].weight is not None


def test_a_race_becomes_measurements(stats: loka.Stats, monkeypatch: pytest.MonkeyPatch) -> None:
    (chain,) = [chain for chain in stats.chains if not chain.lone]
    raced: dict[str, Callable[[], object]] = {}

    def race(functions: Mapping[str, Callable[[], object]], **options: Any) -> Race:
        raced.update(functions)
        timing = Timing(microseconds=Estimate(50, 49, 51), speedup=Estimate(2, 1.9, 2.1), rounds=9)
        timings = {name: timing for name in functions if name != "fused:e5m2_tensor"}
        samples = dict.fromkeys(timings, (50.0,))
        failures = {"fused:e5m2_tensor": "RuntimeError: no"}
        return Race(timings=timings, samples=samples, winner=HP, rounds=9, ended="rounds", failures=failures)

    monkeypatch.setattr(chain_times, "time_interleaved", race)
    whole: list[nn.Module] = []
    monkeypatch.setattr(chain_times, "compile_in_place", lambda module: whole.append(module) or module)
    found = time_chain(chain, stats.layers, {}, device=torch.device("cpu"), settings=Settings())
    assert [type(module) for module in whole] == [nn.Sequential], "hp is compiled, and nothing else"
    timed = [recipe for recipe in CHAIN_RECIPES.values() if not recipe.current and not recipe.z8]
    assert set(raced) == {HP, *(recipe.candidate for recipe in timed)}
    assert found["fused:e4m3_row_z8"].unsupported == "nothing in it can be kept in eight bits"
    assert found["fused:e4m3_row"].speedup.value == 2
    assert found["fused:e5m2_tensor"].unsupported == "cannot be timed: RuntimeError: no"


def test_only_the_recipes_that_are_wanted_are_timed(
    stats: loka.Stats, monkeypatch: pytest.MonkeyPatch
) -> None:
    (chain,) = [chain for chain in stats.chains if not chain.lone]
    raced: list[str] = []

    def race(functions: Mapping[str, Callable[[], object]], **options: Any) -> Race:
        raced.extend(functions)
        return Race(timings={}, samples={}, winner=HP, rounds=9, ended="rounds")

    monkeypatch.setattr(chain_times, "time_interleaved", race)
    monkeypatch.setattr(chain_times, "compile_in_place", lambda module: module)
    settings = Settings(chain_recipes=("e4m3_tensor", "e4m3_row"))
    assert time_chain(chain, stats.layers, {}, device=torch.device("cpu"), settings=settings) == {}
    assert raced == [HP, "fused:e4m3_tensor", "fused:e4m3_row"]
    for each in (settings, Settings(chain_recipes=()), Settings()):
        assert json.loads(json.dumps(each.to_json())) == each.to_json(), "a measurement goes on by it"
    with pytest.raises(UnknownName, match="no recipe of a chain is called 'nonsense'"):
        Settings(chain_recipes=("nonsense",))


def test_equal_chains_have_one_key(stats: loka.Stats) -> None:
    chains = [chain for chain in stats.chains if not chain.lone]
    keys = {chain_key(chain, stats.layers, {}) for chain in chains}
    assert len(keys) == 1
    served = stats.for_inference(batch=0.5)
    assert served.layers["1"].rows == 16
    assert chain_key(chains[0], served.layers, {}) not in keys


def test_serving_holds_weights_in_the_dtype_it_computes_in() -> None:
    model = nn.Linear(48, 32)
    with loka.Probe(model, every=1) as probe, torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(16, 48)).float().mean().backward()
    layer = probe.stats().layers[""]
    assert (layer.dtype, layer.weight_dtype) == ("bfloat16", "float32")
    assert probe.stats().for_inference().layers[""].weight_dtype == "bfloat16"


def test_serving_measures_output_only(stats: loka.Stats) -> None:
    report = loka.measure(
        stats.for_inference(batch=4),
        device="cpu",
        candidates=["emulated:tensorwise_e4m3"],
        settings=Settings(max_draws=4),
    )
    assert {site.problem.gemm.value for site in report.sites.values()} == {"output"}
    assert {site.problem.m for site in report.sites.values()} == {128}
    plan = loka.plan(report, loka.Budget(chains="always"))
    assert list(plan.chains) == ["1"]
