"""Does training send the logits the gradient that labels of clicks would?

    L = c sum_i BCE(z_i, y_i),   y in {0, 1}:     g_i = c p_i where y_i = 0,     -c (1 - p_i) where it is 1

One c fits all rows, whatever scales the loss. KL/H takes an output for the logit of a click, and what is
regressed on has its shape. It is no proof: rows that weigh unequally and soft labels are of clicks and look
otherwise, so a plan says what was seen and goes on (planner/plan.py).
"""

import contextlib
from collections.abc import Callable

import torch

from loka.probe.trace import unseen

NOT_CLICKS = (
    "KL/H is of clicks, and this output's gradient in training is none of equally weighted labels 0 and 1: "
    "if the output predicts no click, KL/H means nothing, plan with ne=None; if it does (weights, soft "
    "labels), pass logits= to Probe, a function from the output to logits"
)
_LEAST_ROWS = 8
_NEAR = 0.05
"""Of c. bf16 rounds a gradient by 0.4 %."""
_ROUNDED = 1e-5
"""Of p - y: float32 makes of p a number that is off by 6e-8, so smaller ones are not known to a percent."""
_ALIKE = 0.9
"""Share of the rows whose c is the median's."""


class ClickLoss:
    """Whether gradients of sampled steps are of a loss over clicks; one that is not settles it for good."""

    def __init__(self) -> None:
        self._other: torch.Tensor | None = None  # on the device: nothing waits for it in a step

    def watch(self, output: object, z: torch.Tensor, *, unless: Callable[[], bool]) -> None:
        """`output` gave the logits `z` [B, 1]; its gradients are of training `unless` that says no."""
        if not isinstance(output, torch.Tensor) or not output.requires_grad or output.numel() != z.numel():
            return
        z = z.detach().flatten().double()

        def see(grad: torch.Tensor) -> None:
            if unless():
                return
            with unseen(), torch.no_grad(), torch.autocast(grad.device.type, enabled=False):
                other = _other(z, grad, probabilities=probabilities)
                self._other = other if self._other is None else self._other | other

        with unseen(), torch.no_grad():
            probabilities = not torch.equal(output.detach().flatten().double(), z)
        with unseen(), contextlib.suppress(RuntimeError):  # such as a tensor that lets no hook be: then nobody knows
            output.register_hook(see)

    def restore(self, reason: str) -> None:
        self._other = torch.tensor(bool(reason), device="cpu")

    def not_clicks(self) -> Callable[[], str]:
        """A function that gives why KL/H may mean nothing, by the steps up to now, or "". It waits for the device."""
        other = self._other
        return lambda: NOT_CLICKS if other is not None and bool(other) else ""


def _other(z: torch.Tensor, grad: torch.Tensor, *, probabilities: bool) -> torch.Tensor:
    """Whether no c fits the gradient [B] of logits z [B]; False of too few rows."""
    g, p, left = grad.flatten().double(), z.sigmoid(), (-z).sigmoid()
    least = 8 * torch.finfo(grad.dtype).smallest_normal if grad.dtype == torch.float16 else 0.0
    known = g.isfinite() & (g.abs() > least)
    if probabilities:
        g = g * p * left
    share = torch.where(g > 0, p, left)
    c = g.abs() / share
    known &= share > _ROUNDED
    middle = torch.where(known, c, torch.nan).nanmedian()
    near = known & ((c / middle - 1).abs() < _NEAR)
    rows = known.sum()
    return (rows >= _LEAST_ROWS) & (near.sum() < _ALIKE * rows)
