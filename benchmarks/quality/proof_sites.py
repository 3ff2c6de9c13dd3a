"""The probed model of the proof site by site, and by plans of several budgets: KL/H and NE by the labels."""

import math
import time
from typing import Any

import numpy as np
import proof_runs
import torch
from proof_judge import changes_of
from proof_models import model_named
from proof_settings import PROBE_SEED, Settings, parts, write
from torch import nn

from loka import Budget, plan
from loka.core.recipe import RECIPES
from loka.core.records.report import Report
from loka.core.records.stats import Stats
from loka.graph.attach import attach, detach
from loka.measurement.predicted_kl import predicted_kl
from loka.train.config import TrainConfig
from loka.validation.variance import KL_SHARE


def single(settings: Settings, name: str) -> str:
    """Each site of the probed model alone in FP8 in forward, in two recipes, until the time is up.

    All else in float32, and the site's operands rounded exactly (the emulated kernel): changing one site
    makes bf16 round all that follows otherwise, which costs 1e-6 of KL/H by itself, more than many sites.
    """
    folder, began = settings.folder(name), time.perf_counter()
    _, held_out, _ = parts(settings)
    config, labels = settings.config(PROBE_SEED), held_out.label.cpu().numpy()
    model = model_named(name, settings.history).to(settings.device)
    model.load_state_dict(torch.load(folder / "probe.pt", map_location=settings.device, weights_only=True))
    stats = Stats.load(folder / "stats")
    before = proof_runs.evaluate(model, held_out, config, bf16=False)
    found: dict[str, Any] = {}
    for path, layer in stats.layers.items():
        for recipe in SINGLE:
            effect = predicted_kl(layer, RECIPES[recipe])
            if effect is None or time.perf_counter() - began > SINGLE_SECONDS:
                continue
            told: dict[str, Any] = {"predicted": [effect.value, effect.low, effect.high]}
            try:
                attach(model, stats.model.layers, {path: (f"emulated:{recipe}", "hp", "hp")})
                after = proof_runs.evaluate(model, held_out, config, bf16=False)
            finally:
                detach(model)
            told |= changes_of(before, after, labels)
            found[f"{path} {recipe}"] = told
    write(folder / "single.json", found)
    write(folder / "budgets.json", budgets(model, Report.load(folder / "report.json"), before, held_out, config))
    points = list(found.values())
    held = sum(one["predicted"][1] <= one["kl"][0] <= one["predicted"][2] for one in points)
    beyond = sum(
        abs(one["labelled"][0] - one["predicted"][0])
        > 2 * math.hypot(one["labelled"][1], KL_SHARE * one["predicted"][0])
        for one in points
    )
    return (
        f"{name}: {len(points)} points in {time.perf_counter() - began:.0f} s: KL/H in its interval {held}, "
        f"labelled NE over 2 SE (rows and seeds) from the prediction {beyond}"
    )


def budgets(
    model: nn.Module, report: Report, before: np.ndarray, held_out: proof_runs.Rows, config: TrainConfig
) -> dict[str, Any]:
    """By budget, what its plan does to the trained model in forward: predicted, KL/H and NE by the labels."""
    found: dict[str, Any] = {}
    labels = held_out.label.cpu().numpy()
    for ne in BUDGETS:
        made = plan(report, Budget(ne=ne, regions=False))
        chosen = {path: (f"emulated:{recipe}", "hp", "hp") for path, recipe in made.output_recipes.items()}
        attach(model, made.model.layers, chosen)
        try:
            after = proof_runs.evaluate(model, held_out, config, bf16=False)
        finally:
            detach(model)
        effects = [d.kl for d in made.decisions.values() if d.kl is not None and d.path in chosen]
        found[f"{ne:g}"] = {
            **changes_of(before, after, labels),
            "predicted": [made.kl.value, made.kl.low, made.kl.high] if made.kl else [0.0, 0.0, 0.0],
            "sites": len(chosen),
            "effects": len(effects),
        }
    return found


BUDGETS = (1e-5, 3e-5, 6e-5, 1e-4, 2e-4)
SINGLE = ("tensorwise_e4m3", "rowwise_e4m3")
SINGLE_SECONDS = 60.0
