"""What `--auto` does, and when."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from loka.core.budget import Budget
from loka.core.exceptions import require_least
from loka.core.numerics.label_rate import Shares
from loka.core.records.report import HP
from loka.kernels.gemm.registry import candidate_named
from loka.measurement.settings import COARSE, Settings

MEASURE_SECONDS = 45.0


@dataclass(frozen=True, kw_only=True)
class AutoConfig:
    """What `Auto` does, and when.

    Attributes:
        every, overhead, base_rate: of the probe. `overhead` is a share of the time of its phase, not of the whole run.
        least_steps: the fewest steps of the probe's phase; by default those of the warm-up and at least 100, since what
            a model is sensitive to moves early.
        most_steps: the phase ends after so many steps, whatever is known; by default a fifth of the run.
        width: the phase ends when the cost of all layers in FP8 is known so well that the upper end, which a budget is
            charged with, is at most `width` times the estimate.
        budget: of the plan. None: an increase of KL/H of 2e-4, or, where no effect can be known, the default
            `Budget()`.
        candidates: what to measure; by default three of torch's on a GPU, which take a minute, and all on a CPU. A name
            that does not exist raises UnknownName.
        settings: how finely to measure; coarsely by default, because the time limit decides how much gets measured.
        measure_seconds: after so many seconds measuring begins nothing new. The largest layers come first, and what was
            not timed stays in bf16. The next run goes on from `cache`. None: until all is measured.
        cache: folder of times that were measured before.
    """

    every: int | Literal["auto"] = "auto"
    overhead: float = 0.05
    base_rate: Shares | None = None
    least_steps: int | None = None
    most_steps: int | None = None
    width: float = 1.5
    budget: Budget | None = None
    candidates: tuple[str, ...] | None = None
    settings: Settings = COARSE
    measure_seconds: float | None = MEASURE_SECONDS
    cache: Path | None = None

    def __post_init__(self) -> None:
        require_least(self, {"least_steps": 1, "most_steps": 1})
        if not self.width > 1:
            raise ValueError(f"width is {self.width}; the upper end lies above the estimate, so it exceeds 1")
        for name in set(self.candidates or ()) - {HP}:
            candidate_named(name)
