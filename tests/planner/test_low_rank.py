"""Low-rank adapters: eight bits never pay for a GEMM with a small rank, and a plan leaves them alone.

FALQON (arXiv 2510.24061) says so of FP8 LoRA: what quantizing costs outweighs what small GEMMs gain. The
times here are those that LoKA has of an H200, quantizing included (docs/scale.md), of a LoRA-wrapped tower of
4096 features.
"""

from __future__ import annotations

import pytest
import torch
from foreign.lora import LoRALinear
from reports import H200, measured
from torch import nn

import loka
from loka.core.problem import linear_problem
from loka.core.recipe import Gemm
from loka.core.records.plan import Decision
from loka.core.records.report import Report, SiteReport
from loka.core.records.scale import LayerTimes
from loka.core.signature import LinearShape, ModelSignature

WIDTH, ROWS = 4096, 8192
FP8 = "emulated:rowwise_e4m3"


def layers_of(rank: int) -> dict[str, LayerTimes]:
    """Base and adapters, as an H200 would take them; the tower has no numbers."""
    with torch.device("meta"):
        wrapped = [LoRALinear(nn.Linear(WIDTH, WIDTH), rank) for _ in range(2)]
        tower = nn.Sequential(wrapped[0], nn.ReLU(), wrapped[1]).to(torch.bfloat16)
        batch = torch.randn(4, WIDTH, dtype=torch.bfloat16)
    return {layer.path: layer for layer in loka.scale(tower, batch, gpu="h200", batch_size=ROWS).layers}


@pytest.fixture(scope="module")
def measured_layers() -> dict[str, LayerTimes]:
    return layers_of(256)


def report_of(layers: dict[str, LayerTimes]) -> Report:
    """The middle of each interval as the time of a race; errors as e4m3 with row scales has them."""
    sites = {}
    for path, layer in layers.items():
        for gemm, times in layer.gemms.items():
            assert times.bf16 is not None
            assert times.eight is not None
            problem = linear_problem(
                Gemm(gemm),
                rows=ROWS,
                in_features=layer.in_features,
                out_features=layer.out_features,
                dtype="bfloat16",
                target="sm_90",
            )
            hp = times.bf16.value
            both = {"hp": measured(55.0, hp, hp), FP8: measured(28.5, times.eight.value, hp)}
            site = SiteReport(path=path, problem=problem, measurements=both)
            sites[site.name] = site
    shapes = {
        path: LinearShape(in_features=layer.in_features, out_features=layer.out_features, bias=False)
        for path, layer in layers.items()
    }
    return Report(
        model=ModelSignature(name="Tower", layers=shapes),
        machine=H200,
        stats_digest="0",
        settings={},
        sites=sites,
    )


def saved(decision: Decision) -> float:
    """Microseconds; the kernel alone is counted, no quantizing is shared here."""
    if decision.candidate == "hp":
        return 0.0
    assert decision.hp_microseconds is not None
    assert decision.microseconds is not None
    return decision.hp_microseconds.value - decision.microseconds.value


def test_no_gemm_of_an_adapter_pays_and_the_base_does(measured_layers: dict[str, LayerTimes]) -> None:
    assert len(measured_layers) == 6
    for path, layer in measured_layers.items():
        for gemm, times in layer.gemms.items():
            assert times.helps == ("no" if "lora" in path else "yes"), f"{path}/{gemm}"
            assert times.speedup is not None
            assert (times.speedup.value < 1) == ("lora" in path)


def test_a_plan_leaves_adapters_in_hp_and_says_by_how_much_they_would_lose(
    measured_layers: dict[str, LayerTimes],
) -> None:
    found = report_of(measured_layers)
    plan = loka.plan(found, loka.Budget())
    for site, decision in plan.decisions.items():
        assert decision.candidate == ("hp" if "lora" in site else FP8), site
        if "lora" in site:
            assert decision.rejected[FP8].startswith("speed-up 0.")
    forced = loka.plan(found, loka.Budget(), force={"*": FP8})
    adapters = [site for site in forced.decisions if "lora" in site]
    lost = sum(saved(forced.decisions[site]) for site in adapters)
    gained = sum(map(saved, plan.decisions.values()))
    assert len(adapters) == 11  # nothing wants a gradient of the tower's input
    assert lost < 0 < gained
    assert -lost > gained, "adapters in eight bits would eat all that the base gains"


def test_of_smaller_ranks_nothing_is_promised() -> None:
    """No such shape was measured: a number for it would be a guess."""
    for path, layer in layers_of(16).items():
        for times in layer.gemms.values():
            assert times.helps == ("unknown" if "lora" in path else "yes")
