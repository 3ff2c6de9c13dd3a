"""When fresh rows allow no promise on KL/H at all, whatever a site does."""

import torch

from loka.core.numerics.label_rate import TaskRates

_LEAST_ROWS = 8.0  # equally sensitive ones that the picked rows have to be worth
_SATURATED = 1e-3  # of the variance of a label that the predictions leave


def no_promise(z: torch.Tensor, rates: TaskRates | None) -> str:
    """Why nothing can be promised from rows with the logits `z` [m, T]; "" where something can.

    p (1 - p) is what a row weighs. Saturated logits have next to none: every error looks free, and
    once FP8 moves such a logit by several units the second order does not tell what that costs.
    """
    if rates is not None and rates.unsupported:
        return rates.unsupported
    z = z.double()
    p, left = z.sigmoid(), (-z).sigmoid()
    weight = (p * left).sum(dim=1)
    rows, total = len(z), weight.sum().item()
    worth = total**2 / weight.square().sum().item() if total > 0 else 0.0
    variance = sum(share * (1 - share) for share in rates.shares) if rates is not None else 0.0
    if worth < min(_LEAST_ROWS, rows / 2) or total / rows < _SATURATED * variance:
        return (
            f"the logits are saturated: {rows} rows weigh by p (1 - p) as {worth:.1f} do, or nothing, "
            "and what an error costs there is not of second order"
        )
    expected = min(p.sum(dim=0).min().item(), left.sum(dim=0).min().item())
    if rates is None and expected < 1:
        return (
            f"the model predicts {expected:.2g} labels of the rarer kind in {rows} rows, which do not tell "
            "their rate: pass base_rate= from the labels"
        )
    return ""
