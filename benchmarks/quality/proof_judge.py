"""What a change of predictions is worth: KL/H and NE by the labels, never one for the other.

    KL/H   mean KL(p || p') / H          no labels: what a calibrated model would lose
    NE     mean (loss' - loss) / H       by the labels, = first + KL/H in the mean over many rows
    first  mean (p - y) (z' - z) / H     vanishes in an annealed model, but for the noise of the labels

Absolute, each with its standard error over rows. H is the entropy of the held-out labels' rate.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from proof_runs import divergence, entropy

from loka.core.budget import total_effect, upper_bound
from loka.core.error import Estimate
from loka.train.metrics import checked, log_losses, probabilities
from loka.validation.annealed import annealed
from loka.validation.paired import NE_LIMIT_PERCENT
from loka.validation.runs import HeldOut
from loka.validation.variance import KL_SHARE, Expected, pair_variances
from loka.validation.verdicts import ERROR, RowsVerdict


def changes_of(before: np.ndarray, after: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """`kl`, `labelled` and `first`, each [value, standard error], absolute; and NE before."""
    h = entropy(labels)
    z, clicked = checked(before, labels)
    low, _ = checked(after, labels)
    loss = log_losses(z, clicked)
    parts = {
        "kl": divergence(z, low) / h,
        "labelled": (log_losses(low, clicked) - loss) / h,
        "first": (probabilities(z) - clicked) * (low - z) / h,
    }
    told: dict[str, Any] = {name: [part.mean(), part.std() / math.sqrt(len(part))] for name, part in parts.items()}
    return {**told, "ne": loss.mean() / h}


def summed(effects: Sequence[Estimate]) -> list[float]:
    """value, low, high, and what a budget is charged."""
    total = total_effect(effects)
    return [total.value, total.low, total.high, math.fsum(upper_bound(effect) for effect in effects)]


def judged(folder: Path, arms: Sequence[str], seeds: Sequence[int], labels: np.ndarray) -> dict[str, Any]:
    """Each arm against the first of `arms`, over the seeds that both have."""
    control, *others = arms
    there = {arm: [s for s in seeds if (folder / f"{arm}-{s}.npz").exists()] for arm in arms}
    kept: dict[int, np.ndarray] = {}
    rest: list[HeldOut] = []
    for seed in there[control]:
        with np.load(folder / f"{control}-{seed}.npz") as file:
            kept[seed] = file["logits"]
            rest.append(HeldOut(file["logits"], labels, file.get("mean_logits")))
    h = entropy(labels)
    by_control = {seed: log_losses(*checked(z, labels)) for seed, z in kept.items()}
    found: dict[str, Any] = {}
    group = np.zeros(len(labels), np.int64)
    for arm in others:
        losses, pairs, apart = [], {}, []
        for seed in there[arm]:
            if seed not in by_control:
                continue
            with np.load(folder / f"{arm}-{seed}.npz") as file:
                z = file["logits"]
            loss = log_losses(*checked(z, labels))
            losses.append((by_control[seed], loss))
            difference = loss - by_control[seed]
            error = difference.std() / math.sqrt(len(loss)) / by_control[seed].mean()
            pairs[seed] = [100 * (loss.mean() / by_control[seed].mean() - 1), 100 * error]
            kl = divergence(kept[seed], z) / h
            apart.append([100 * kl.mean(), 100 * kl.std() / math.sqrt(len(kl))])
        if not losses:
            continue
        by_kl = KL_SHARE * float(np.mean(apart, axis=0)[0] * h / np.mean([a.mean() for a, _ in losses]))
        expected = Expected(by_kl, 0, "KL/H of these pairs")
        variance = replace(pair_variances(losses, group, 1)[0], expected=expected)
        verdict = RowsVerdict(
            name="all rows", variance=variance, clicks=int(labels.sum()), limit=NE_LIMIT_PERCENT, tail=ERROR
        )
        interval = verdict.ne_percent
        found[arm] = {
            "ne_percent": [interval.value, interval.low, interval.high],
            "between": variance.between_pairs,
            "rows_error": variance.rows_error,
            "pairs": pairs,
            "kl_percent_of_h": apart,
            "verdict": verdict.verdict,
            "outlook": verdict.outlook,
        }
    ne = {seed: loss.mean() / h for seed, loss in by_control.items()}
    return {
        "ne": ne,
        "rows": len(labels),
        "clicks": int(labels.sum()),
        "annealed": str(annealed(0.0, rest)) if rest else "",
        "arms": found,
    }
