"""When rows allow no promise on KL/H at all, whatever a site does."""

import torch

from loka.core.numerics.effect import NO_PROMISE
from loka.core.numerics.label_rate import TaskRates
from loka.probe.model_effects.logits import NoEffect

_LEAST_ROWS = 8.0  # equally sensitive ones that the picked rows have to be worth
_ALONE = 2.0  # what the samples of one step may be worth where a row or two outweigh all others
_ALIKE = 1e-5  # of a logit: kernels may round copies otherwise
_SATURATED = 1e-3  # of the variance of a label that the predictions leave


def no_promise(z: torch.Tensor, rates: TaskRates | None) -> str:
    """Why nothing can be promised from rows with the logits `z` [m, T]; "" where something can.

    p (1 - p) is what a row weighs. Saturated logits have next to none: every error looks free, and
    once FP8 moves such a logit by several units the second order does not tell what that costs.
    """
    if rates is not None and rates.unsupported:
        return rates.unsupported
    rows, total, worth = _weighed(z)
    if copies := _copies(z):
        return copies
    p, left = z.double().sigmoid(), (-z.double()).sigmoid()
    variance = sum(share * (1 - share) for share in rates.shares) if rates is not None else 0.0
    if worth < min(_LEAST_ROWS, rows / 2) or total / rows < _SATURATED * variance:
        return _saturated(rows, worth)
    expected = min(p.sum(dim=0).min().item(), left.sum(dim=0).min().item())
    if rates is None and expected < 1:
        return (
            f"the model predicts {expected:.2g} labels of the rarer kind in {rows} rows, which do not tell "
            "their rate: pass base_rate= from the labels"
        )
    return ""


def refuse_saturated(z: torch.Tensor) -> None:
    """Raises NoEffect where the samples of a step, with logits `z` [m, T], weigh as next to none do."""
    rows, _, worth = _weighed(z)
    if reason := _copies(z) or (_saturated(rows, worth) if worth < min(_ALONE, rows / 2) else ""):
        raise NoEffect(NO_PROMISE + reason)


def _copies(z: torch.Tensor) -> str:
    if len(z) < 2 or (z.amax(dim=0) - z.amin(dim=0) > _ALIKE * z.abs().amax(dim=0)).any():
        return ""
    return f"all {len(z)} rows have the same logits, as copies of one have, which tell of no other"


def _weighed(z: torch.Tensor) -> tuple[int, float, float]:
    """How many rows there are, the sum of p (1 - p) over them, and how many of one weight they are worth."""
    weight = (z.double().sigmoid() * (-z.double()).sigmoid()).sum(dim=1)
    of_largest = weight / weight.amax().clamp_min(torch.finfo(weight.dtype).tiny)  # their squares are not all lost
    squares = of_largest.square().sum().item()
    return len(z), weight.sum().item(), of_largest.sum().item() ** 2 / squares if squares > 0 else 0.0


def _saturated(rows: int, worth: float) -> str:
    return (
        f"the logits are saturated: {rows} rows weigh by p (1 - p) as {worth:.1f} do, or nothing, "
        "and what an error costs there is not of second order"
    )
