"""How the learning rates go over a run: warm-up, then constant, or down to `final_rate` of the peak.

    warm-up    (k + 1) / W                                           update k (0-based) of the first W
    cosine     f + (1 - f) (1 + cos(pi t)) / 2                       t = (k - P) / (S - P) of S updates
    linear     f + (1 - f) (1 - t)
    wsd        1, and over the last `decay` of the updates linear    warm-up, stable, decay (2405.18392)

The peak P is the last update of the warm-up or the first of all, and no update is spent at `final_rate`
itself, where nothing would move if it is 0. One torch LambdaLR drives each optimizer, the dense one and those
of the tables. The factor depends on the update's number alone, so a resumed run needs nothing but its step.
A rate that is a tensor is written to in place, which a captured CUDA graph reads at its next replay, and
nothing waits for the device.
"""

import functools
import math
import warnings
from collections.abc import Mapping

import torch
from torch.optim.lr_scheduler import LambdaLR

from loka.train.config import TrainConfig


def rate_factor(step: int, steps: int | None, config: TrainConfig) -> float:
    """What both rates of `config` are multiplied by at update `step` (0-based) of `steps`.

    Without a known number of steps there is neither warm-up nor decay: 1.
    """
    if steps is None:
        return 1.0
    warm, step = warmup_steps(steps, config), min(step, steps)
    if step < warm:
        return (step + 1) / warm
    if config.schedule == "constant":
        return 1.0
    first = warm  # of the updates whose rate falls; the one before it is the last at the peak
    if config.schedule == "wsd":
        first = max(warm, steps - steps_of(config.decay, steps))
    peak = max(first - 1, 0)
    passed = max(step - peak, 0) / (steps - peak)
    left = (1 + math.cos(math.pi * passed)) / 2 if config.schedule == "cosine" else 1 - passed
    return config.final_rate + (1 - config.final_rate) * left


def warmup_steps(steps: int, config: TrainConfig) -> int:
    return steps_of(config.warmup, steps)


def steps_of(share: float, steps: int) -> int:
    """At least that share of them: 7 of 100 for 0.07, which times 100 is a little more than 7 in float64."""
    exact = steps * share
    return round(exact) if math.isclose(exact, round(exact), rel_tol=1e-12) else math.ceil(exact)


def schedulers(
    optimizers: Mapping[str, torch.optim.Optimizer], config: TrainConfig, steps: int | None, *, done: int = 0
) -> dict[str, LambdaLR]:
    """A torch scheduler for each optimizer of `build_optimizers`, `done` updates into `steps`.

    The rates are set for the next update. Call `step()` of each after every update.

    Args:
        steps: of the whole run. None where nobody knows: the rates then stay constant, and a warning says so.
    """
    if steps is None and config.schedule != "constant":
        warnings.warn(
            f"the number of steps is not known, so the learning rates stay constant and do not follow "
            f"schedule={config.schedule!r}. Give the number of steps, or say schedule='constant'",
            RuntimeWarning,
            stacklevel=2,
        )
    found = {}
    factor = functools.partial(rate_factor, steps=steps, config=config)
    for name, optimizer in optimizers.items():
        for group in optimizer.param_groups:
            # A number: LambdaLR would make it a tensor where the rate is one, and read that back from the
            # device, which waits for it, at every step.
            group["initial_lr"] = config.lr if name == "dense" else config.sparse_lr
        found[name] = LambdaLR(optimizer, lambda step: factor(step), last_epoch=done - 1)
    return found


def describe(config: TrainConfig, steps: int) -> str:
    """A line for readers, such as "rates rise over 16 steps, then fall along a cosine to 0 over 140"."""
    warm = warmup_steps(steps, config)
    rise = f"rates rise over {warm} steps, then" if warm else "rates"
    end = f"to {config.final_rate:g} of the peak" if config.final_rate else "to 0"
    match config.schedule:
        case "constant":
            return f"{rise} stay constant: the model is not annealed at the end"
        case "wsd":
            falling = min(steps_of(config.decay, steps), steps - warm)
            return f"{rise} stay constant, and fall linearly {end} over the last {falling} of {steps} steps"
        case "linear":
            return f"{rise} fall linearly {end} over {steps - warm}"
        case _:
            return f"{rise} fall along a cosine {end} over {steps - warm}"
