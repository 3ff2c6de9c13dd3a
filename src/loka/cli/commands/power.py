"""What `loka validate` says of power: before it starts by earlier pairs, afterwards by resampling them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from loka.validation.arms import NUDGED
from loka.validation.pair_bank import Bank, deposit, prior_of, resample
from loka.validation.power import forecast
from loka.validation.record import Validation
from loka.validation.variance import MIN_PAIRS, PairVariance
from loka.validation.verdicts import ERROR

HARM = 0.05  # percent of NE, beside the limit itself: what has to be found


@dataclass(frozen=True, kw_only=True)
class Power:
    """Of a validation of `pairs` pairs, whose error the `tasks` share. `file` is the bank's, or None."""

    file: Path | None
    prior_sd: float | None
    pairs: int
    limit: float
    sequential: bool
    tasks: int

    @cached_property
    def bank(self) -> Bank:
        """Empty where there is no file. Raises FileRefused for a damaged one."""
        return Bank.load(self.file) if self.file is not None and self.file.exists() else Bank()

    def before(self, world: str, arms: Sequence[str], held_out: int) -> str:
        """How many pairs and rows the limit will need, or why nobody knows yet."""
        known = prior_of(self.bank, world, tuple(arms))
        if self.prior_sd is not None:
            by = f"by the given standard deviation of {self.prior_sd:g} %"
            prior = PairVariance(
                mean=0.0, pairs=MIN_PAIRS, rows=held_out, between_pairs=self.prior_sd, rows_error=math.nan
            )
        elif known is not None:
            by, prior = f"by {len(known.pairs)} banked pairs of {known.name}", known.variance
        else:
            others = len({arm.world for arm in self.bank.arms})
            held = f" ({self.file} holds pairs of {others} other models, rows or settings)" if others else ""
            return (
                "how many pairs will decide is not known before the first ones: their variance depends on "
                f"the model, rows and schedule{held}. --prior-sd gives one, --bank keeps trained pairs"
            )
        found = forecast(
            prior,
            pairs=self.pairs,
            limit=self.limit,
            held_out=held_out,
            by_rows=known.by_rows if known is not None and self.prior_sd is None else 0.0,
            sequential=self.sequential,
            tail=ERROR / self.tasks,
        )
        return f"{by}: {found}"

    def after(self, found: Validation) -> str | None:
        """Puts the pairs into the bank, and says what it knows by then; None without a bank."""
        if self.file is None:
            return None
        bank = deposit(self.bank, found)
        bank.save(self.file)
        lines = [f"pairs of these in {self.file}, and validations of {self.pairs} resampled from them:"]
        for arm in bank.of(found.world):
            if len(arm.pairs) < MIN_PAIRS:
                continue
            about = f"{arm.title}, {len(arm.pairs)} pairs, {arm.variance.between_pairs:.3g} % between them"
            none, harm, limit = (
                resample(
                    arm,
                    pairs=self.pairs,
                    limit=self.limit,
                    effect=effect,
                    sequential=self.sequential,
                    expected=None if arm.name == NUDGED else found.expected.get(arm.task),
                    tail=ERROR / self.tasks,
                )
                for effect in (0.0, HARM, self.limit)
            )
            lines.append(
                f"{about}: nothing wrong passes in {none.passed:.0%} and fails in {none.failed:.1%}, and its "
                f"interval contains 0 in {none.contains_zero:.1%}; a harm of {HARM:g} % fails in "
                f"{harm.failed:.0%}; one of {self.limit:g} % passes in {limit.passed:.1%}"
            )
        if len(lines) == 1:
            lines.append(f"none has {MIN_PAIRS} pairs yet")
        return "\n".join(lines)
