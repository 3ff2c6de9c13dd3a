"""Did quality change between two models that saw the same rows?

Unpaired seeds cannot resolve 0.02 % of NE: their noise is larger. On the same rows most
noise is common to both models and cancels in per-row differences d_i = loss_b,i - loss_a,i:

    ne_percent = 100 * mean(d) / mean(loss_a)         (the base-rate entropy cancels)
    se         = 100 * std(d_i - r * loss_a,i) / (mean(loss_a) * sqrt(N)),  r = mean(d) / mean(loss_a)

The second line is the delta method for a ratio of means (Cochran, Sampling Techniques,
section 6.4). Calibration is a ratio of means too, sum p / sum y, and its difference has the same form.
The AUC is a mean over pairs of a click and another row. Of click i let v_i be the share of others that it
outranks, and of other row j let w_j be the share of clicks that outrank it (DeLong et al., Biometrics 44,
1988); both models predict the same rows, so the differences of v and w are all that is needed:

    auc = mean(dv) = mean(dw),    se^2 = var(dv) / N1 + var(dw) / N0

An interval of one pair covers the choice of evaluation rows only; `across_pairs` adds what training
seeds contribute.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from loka.core.error import Estimate, around, estimate_mean, student_t_95
from loka.core.storage.codec import record, sparse
from loka.train.metrics import Floats, Placements, checked, divergences, log_losses, probabilities

NE_LIMIT_PERCENT = 0.02

Verdict = Literal["pass", "fail", "undecided"]


def verdict(ne_percent: Estimate, *, limit: float = NE_LIMIT_PERCENT) -> Verdict:
    """Whether NE is unchanged: the interval lies inside [-limit, limit], outside it, or across.

    It is a two-sided question: a gain beyond the limit is a change as well, and "fail".
    """
    if -limit <= ne_percent.low and ne_percent.high <= limit:
        return "pass"
    if ne_percent.low > limit or ne_percent.high < -limit:
        return "fail"
    return "undecided"


@record(ignore=frozenset({"verdict"}))
@dataclass(frozen=True)
class PairedDifference:
    """Model b minus model a: NE by the labels in percent of a's, AUC and calibration in their own units.

    `kl_percent` is KL/H of b's predictions from a's, in percent of a's NE too: what NE would rise by were a
    calibrated, without labels. It and `rows` are None in comparisons of before.
    """

    ne_percent: Estimate
    auc: Estimate
    calibration: Estimate
    rows: int | None = None
    kl_percent: Estimate | None = sparse(None)

    @property
    def verdict(self) -> Verdict:
        return verdict(self.ne_percent)


@record(derived=("verdict",))
@dataclass(frozen=True)
class AcrossPairs:
    """Means over `pairs` independent training pairs with Student-t intervals."""

    ne_percent: Estimate
    auc: Estimate
    calibration: Estimate
    pairs: int

    @property
    def verdict(self) -> Verdict:
        return verdict(self.ne_percent)


def paired_difference(logits_a: npt.ArrayLike, logits_b: npt.ArrayLike, labels: npt.ArrayLike) -> PairedDifference:
    """How `logits_b` [N] differ from `logits_a` [N] on the same `labels` [N], with 95 % intervals.

    Swapping the models flips the sign of AUC and calibration exactly. With one row of a class the AUC's
    interval is infinite.

    Raises:
        ValueError: one class is absent, or model a has no loss that a difference could be relative to.
        NonFinite: a logit is nan or infinite.
    """
    a, clicked = checked(logits_a, labels)
    b, _ = checked(logits_b, labels)
    if clicked.all() or not clicked.any():
        raise ValueError(f"all {len(a)} labels are the same; NE and AUC need rows of both classes")
    loss_a, loss_b = log_losses(a, clicked), log_losses(b, clicked)
    if not loss_a.any():
        raise ValueError("model a has zero loss on every row; a relative difference does not exist")
    ne = _ratio(loss_b - loss_a, loss_a)
    kl = _ratio(divergences(a, b), loss_a)
    return PairedDifference(
        ne_percent=ne.mapped(_percent),
        auc=_auc(Placements.of(a, clicked), Placements.of(b, clicked)),
        calibration=_ratio(probabilities(b) - probabilities(a), clicked.astype(np.float64)),
        rows=len(a),
        kl_percent=kl.mapped(_percent),
    )


def across_pairs(differences: Sequence[PairedDifference]) -> AcrossPairs:
    """Mean difference over pairs trained with different seeds; at least two, better four or more."""
    if len(differences) < 2:
        raise ValueError(f"{len(differences)} pair(s) have no variance to estimate; train at least two")
    return AcrossPairs(
        ne_percent=estimate_mean([pair.ne_percent.value for pair in differences]),
        auc=estimate_mean([pair.auc.value for pair in differences]),
        calibration=estimate_mean([pair.calibration.value for pair in differences]),
        pairs=len(differences),
    )


def _percent(share: float) -> float:
    return 100 * share


def _ratio(difference: Floats, base: Floats) -> Estimate:
    """mean(difference) / mean(base) over rows [N]."""
    scale = float(base.mean())
    value = float(difference.mean()) / scale
    deviation = float((difference - value * base).std(ddof=1)) / scale
    return around(value, student_t_95(len(base) - 1) * (deviation / len(base) ** 0.5))


def _auc(a: Placements, b: Placements) -> Estimate:
    gains, losses = b.clicks - a.clicks, b.others - a.others
    clicks, others = len(gains), len(losses)
    value = int(gains.sum()) / (2 * clicks * others)
    if min(clicks, others) < 2:
        return Estimate(value, -math.inf, math.inf)
    dv, dw = gains / (2 * others), losses / (2 * clicks)
    variance = float(dv.var(ddof=1)) / clicks + float(dw.var(ddof=1)) / others
    # The smaller class says how well the variance is known; that of both together would be a little more.
    return around(value, student_t_95(min(clicks, others) - 1) * math.sqrt(variance))
