"""How far two computations of one answer are apart, output by output: sizes and kinds of outputs differ."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loka.core.error import sqnr_db

LEAST_DB = 20.0
"""Between outputs, saved and loaded, or eager and compiled: other kernels round otherwise. Where eight bits
themselves cost more, it is less (AnswerError.least_db)."""
FLOOR_DB = 6.0
"""At least, whatever eight bits cost: another model agrees to 0 or less."""
_HALF = 0.5


@dataclass(frozen=True, kw_only=True)
class AnswerError:
    """Of one output of the frozen model on the calibration rows, against the model in high precision.

    Attributes:
        changed: share of entries that differ, which is all that integers and booleans tell.
        max_abs, mean_abs, rms: differences, and the root mean square of the latter's entries, where both are
            finite; zeros of integers and booleans.
    """

    changed: float
    max_abs: float
    mean_abs: float
    rms: float

    @property
    def least_db(self) -> float:
        """What two computations of one answer agree to, in dB, where other kernels round otherwise.

        Each may be as far from high precision as calibration's answers were, and two twice that apart.
        At most `LEAST_DB`, at least `FLOOR_DB`.
        """
        if self.mean_abs <= 0.0 or self.rms <= 0.0:
            return LEAST_DB
        apart = 2 * self.mean_abs * math.sqrt(math.pi / 2)  # a normal error's root mean square
        return min(max(20 * math.log10(self.rms / apart), FLOOR_DB), LEAST_DB)

    @property
    def most_changed(self) -> float:
        """Share of integers and booleans that may differ between two computations."""
        return max(2 * self.changed, _HALF)

    def __str__(self) -> str:
        if not self.rms:
            return f"{self.changed:.2%} of its entries differ from high precision's"
        return (
            f"differs from high precision by {self.mean_abs:.2e} on average and {self.max_abs:.2e} at most; its root "
            f"mean square is {self.rms:.2e}"
        )


def error_of(found: torch.Tensor, exact: torch.Tensor) -> AnswerError:
    """Of one output, by all of its rows."""
    found, exact = as_real(found), as_real(exact)
    differing = (found != exact).logical_and(found.isfinite() | exact.isfinite())
    changed = float(differing.double().mean()) if exact.numel() else 0.0
    if not exact.is_floating_point():
        return AnswerError(changed=changed, max_abs=0.0, mean_abs=0.0, rms=0.0)
    low, high = finite_in_both(found, exact)
    if not high.numel():
        return AnswerError(changed=changed, max_abs=0.0, mean_abs=0.0, rms=0.0)
    apart = (low - high).abs()
    return AnswerError(
        changed=changed,
        max_abs=float(apart.max()),
        mean_abs=float(apart.mean()),
        rms=float(high.square().mean().sqrt()),
    )


def as_real(x: torch.Tensor) -> torch.Tensor:
    """Of complex numbers both parts, side by side."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def finite_in_both(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries of both in float64, flat."""
    one, other = as_real(one), as_real(other)
    both = one.isfinite() & other.isfinite()
    return one[both].double(), other[both].double()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """NaN with NaN, too. Tensors that are not strided have none."""
    forms = [(each.dtype, each.device, each.shape, each.layout) for each in (one, other)]
    return forms[0] == forms[1] and one.layout is torch.strided and torch.equal(*map(_bits, (one, other)))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def disagreements(
    found: Sequence[torch.Tensor], want: Sequence[torch.Tensor], errors: Sequence[AnswerError] | None
) -> list[str]:
    """Why these are no two computations of one answer, by output; nothing where they agree.

    Args:
        errors: of each output; None: they are not known, and `FLOOR_DB` is asked for.
    """
    why = []
    for place, (one, other) in enumerate(zip(map(as_real, found), map(as_real, want), strict=True)):
        lost = int((one.isfinite() != other.isfinite()).sum())
        if lost:
            why.append(f"output {place}: {lost} of {other.numel()} entries are finite in one of the two only")
        elif other.is_floating_point():
            least = FLOOR_DB if errors is None else errors[place].least_db
            agreement = sqnr_db(*finite_in_both(one, other))
            if not agreement >= least:
                why.append(f"output {place} agrees to {agreement:.1f} dB, and {least:.1f} are asked for")
        else:
            changed = error_of(one, other).changed
            most = _HALF if errors is None else errors[place].most_changed
            if changed > most:
                why.append(f"output {place}: {changed:.0%} of its entries differ, and {most:.0%} may")
    return why
