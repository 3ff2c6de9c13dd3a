"""Which GEMM kernels run inside a chain or a stack of cross layers: the measured ones, one rule for
timing it and for planning it; and what runs where nothing was measured."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from loka.core.chain_recipe import ChainRecipe
from loka.core.cross_record import CrossStack, Whole
from loka.core.recipe import Gemm
from loka.core.report import SiteReport, site_name
from loka.kernels.registry import candidate_named


def inner_kernels(whole: Whole, recipe: ChainRecipe, sites: Mapping[str, SiteReport]) -> dict[str, str]:
    """By site, the fastest of the measured kernels with scales of tensors, where one was timed.

    Inside a chain operands come quantized, and quantization costs these kernels the same: they
    stand in the order of their times. grad_weight keeps to exact accumulation, over all rows of a
    batch. A chain's `output` is left to the GEMM with the producer in its epilogue where that can run.
    """
    found: dict[str, str] = {}
    gemms = [Gemm.GRAD_INPUT, Gemm.GRAD_WEIGHT, *([Gemm.OUTPUT] if isinstance(whole, CrossStack) else [])]
    for path in whole.linears:
        for gemm in gemms:
            site = sites.get(site_name(path, gemm))
            times = {}
            for name, measured in site.measurements.items() if site else ():
                wanted = name.partition("@")[0].endswith(f":{recipe.gemm_recipe(gemm)}")
                if not wanted or measured.microseconds is None:
                    continue
                candidate = candidate_named(name)
                if gemm is Gemm.GRAD_WEIGHT and candidate.kernel.fast:
                    continue
                times[name] = measured.microseconds.value
            if times:
                found[site_name(path, gemm)] = min(times, key=lambda name: (times[name], name))
    return found


def plain_kernels(whole: Whole, recipe: ChainRecipe, device: torch.device) -> dict[str, str]:
    """By site: what runs where nothing was measured. Emulation on a CPU, else torch's kernels.

    They accumulate fast where K is short; grad_weight sums over all rows of a batch, where that
    loses too much.
    """
    kernel = dict.fromkeys(Gemm, "emulated")
    if device.type == "cuda":
        kernel = {Gemm.OUTPUT: "torch_fast", Gemm.GRAD_INPUT: "torch_fast", Gemm.GRAD_WEIGHT: "torch"}
    return {
        site_name(path, gemm): f"{kernel[gemm]}:{recipe.gemm_recipe(gemm)}"
        for path in whole.linears
        for gemm in Gemm
    }
