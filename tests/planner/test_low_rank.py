"""Low-rank adapters: eight bits never pay for a GEMM with a small rank, and a plan leaves them alone.

FALQON (arXiv 2510.24061) says so of FP8 LoRA: quantizing outweighs what small GEMMs gain. Times are those
that LoKA has of an H200, quantizing included (docs/scale.md), of a LoRA-wrapped layer of 4096 features.
"""

import torch
from foreign.models.lora import LoRALinear
from reports import H200, measured
from torch import nn

import loka
from loka.core.problem import linear_problem
from loka.core.recipe import Gemm
from loka.core.records.report import Report, SiteReport
from loka.core.signature import LinearShape, ModelSignature

FP8, ROWS = "emulated:rowwise_e4m3", 8192


def layers_of(rank):
    with torch.device("meta"):
        tower = nn.Sequential(LoRALinear(nn.Linear(4096, 4096), rank)).to(torch.bfloat16)
    batch = torch.randn(4, 4096, dtype=torch.bfloat16, device="meta")
    return loka.scale(tower, batch, gpu="h200", batch_size=ROWS).layers


def test_a_plan_leaves_adapters_in_hp_and_says_by_how_much_they_would_lose():
    """The middle of each interval as the time of a race; errors as those of e4m3 with row scales."""
    sites, shapes, gains = {}, {}, {True: 0.0, False: 0.0}
    for layer in layers_of(256):
        sides = {"in_features": layer.in_features, "out_features": layer.out_features}
        shapes[layer.path] = LinearShape(**sides, bias=False)
        adapter = "lora" in layer.path
        for gemm, times in layer.gemms.items():
            assert times.helps == ("no" if adapter else "yes")
            problem = linear_problem(Gemm(gemm), rows=ROWS, dtype="bfloat16", target="sm_90", **sides)
            hp, low = times.bf16.value, times.eight.value
            gains[adapter] += hp - low
            found = {"hp": measured(55.0, hp, hp), FP8: measured(28.5, low, hp)}
            site = SiteReport(path=layer.path, problem=problem, measurements=found)
            sites[site.name] = site
    assert -gains[True] > gains[False] > 0, "adapters in eight bits would eat all that the base gains"
    model = ModelSignature(name="Tower", layers=shapes)
    report = Report(model=model, machine=H200, stats_digest="0", settings={}, sites=sites)
    plan = loka.plan(report, loka.Budget())
    assert {path.partition("/")[0] for path in plan.decisions} == {"0.base", "0.lora_A", "0.lora_B"}
    for site, decision in plan.decisions.items():
        assert decision.candidate == ("hp" if "lora" in site else FP8), site
        assert ("lora" in site) == decision.rejected.get(FP8, "").startswith("speed-up 0.")


def test_of_smaller_ranks_nothing_is_promised():
    """No such shape was measured: a number for it would be a guess."""
    for layer in layers_of(16):
        expected = "unknown" if "lora" in layer.path else "yes"
        assert {times.helps for times in layer.gemms.values()} == {expected}
