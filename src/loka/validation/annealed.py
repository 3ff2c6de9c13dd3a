"""Is this model annealed? Its weights rest at the end of training, or they still move with every batch.

z are the held-out logits of the weights after the last step, z' those of the mean of the weights over the end
of the run (train/average.py), p = sigmoid(z), y the labels. The change of the loss from z to z' has exactly
two parts,

    mean(loss' - loss) = mean((p - y) (z' - z)) + mean(KL(p || p'))        gain = first + KL

The first is of first order in the change and has either sign; the second is what a label-free prediction
sees. At a constant rate the weights wander around their mean: the mean is better, and the first-order term is
large. Whatever moves the weights, FP8's rounding too, then changes NE by a term of its own, which hides a
cost of 0.02 %, and differs from run to run. In an annealed model the weights are at their mean, and both
vanish.

    annealed        the last rate is at most RATE of the peak, and |gain| is at most GAIN percent of the loss
    not annealed    the rate is higher, or |gain| exceeds GAIN by more than two standard errors
    not known       no mean was kept, or the rows are too few to tell
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loka.core.annealing import ANNEALED_RATE
from loka.core.error import Z95, Estimate, around
from loka.core.storage.codec import record
from loka.train.metrics import checked, log_losses, probabilities
from loka.validation.runs import HeldOut

RATE = ANNEALED_RATE
GAIN = 0.1
"""Percent of the loss, five times the line of 0.02 %."""


@record(derived=("annealed",))
@dataclass(frozen=True, kw_only=True)
class Annealed:
    """`final_rate` is a share of the peak. In percent of the loss, over `runs` runs, None where no mean of
    the weights was kept: `gain` what the mean has over the last weights (negative is better) with its 95 %
    interval over rows, `first_order` and `divergence` its two parts."""

    final_rate: float
    runs: int = 0
    gain: Estimate | None = None
    first_order: float | None = None
    divergence: float | None = None

    @property
    def annealed(self) -> bool | None:
        """None where it is not known."""
        if self.final_rate > RATE:
            return False
        if self.gain is None:
            return None
        if self.gain.low > GAIN or self.gain.high < -GAIN:
            return False
        return True if abs(self.gain.value) <= GAIN else None

    def __str__(self) -> str:
        said = {True: "annealed", False: "NOT annealed", None: "not known whether it is annealed"}
        text = f"{said[self.annealed]}: the last rate is {self.final_rate:.2g} of the peak"
        if self.gain is None:
            return f"{text}; --average tail would tell whether the weights rest"
        parts = f"first order {self.first_order:+.3f} %, KL {self.divergence:+.3f} %"
        text += (
            f", and the mean of the weights changes NE by {self.gain.shown('+.3f', ' %')} "
            f"({parts}; up to {GAIN:g} % either way is rest)"
        )
        if self.annealed is False:
            text += ". Let the rate decay (--schedule cosine): a cost of 0.02 % is hidden in this movement"
        return text


def annealed(final_rate: float, held_out: Sequence[HeldOut] = ()) -> Annealed:
    """Whether runs of one kind are annealed, by their last rate and their held-out rows."""
    both = [(found, found.mean_logits) for found in held_out if found.mean_logits is not None]
    if not both:
        return Annealed(final_rate=final_rate)
    gains, first, residual = [], [], 0.0
    for found, mean_logits in both:
        z, clicked = checked(found.logits, found.labels)
        mean_z, _ = checked(mean_logits, found.labels)
        loss, mean_loss = log_losses(z, clicked), log_losses(mean_z, clicked)
        gain = (mean_loss - loss).mean() / loss.mean()
        gains.append(100 * float(gain))
        first.append(100 * float(((probabilities(z) - clicked) * (mean_z - z)).mean() / loss.mean()))
        residual = residual + (mean_loss - loss - gain * loss) / loss.mean()
    count, rows = len(both), len(both[0][0].labels)
    # Over rows: whether these very weights rest is asked, not whether those of other seeds would.
    half = Z95 * 100 * float(np.std(residual / count, ddof=1)) / rows**0.5
    mean = float(np.mean(gains))
    return Annealed(
        final_rate=final_rate,
        runs=count,
        gain=around(mean, half),
        first_order=float(np.mean(first)),
        divergence=mean - float(np.mean(first)),
    )
