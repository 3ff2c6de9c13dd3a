"""How finely to measure."""

import math
from dataclasses import dataclass

from loka.core.exceptions import require_least
from loka.core.storage.codec import named
from loka.core.timing import MAX_ROUNDS, TIE


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How finely to measure.

    Attributes:
        rows: input rows drawn for the error (and contracted over in grad_weight).
        min_draws, max_draws: bounds on the number of draws of a layer's operands.
        interval_db: half-width of the `sqnr_db` interval at which drawing stops.
        interval_share: the same for `shrink` and `bias` of gradients (core/numerics/direction.py).
        max_rounds: at which the race of a site ends with what it knows (core/timing.py).
        search_rounds: the same for the race between the algorithms of one kernel.
        quantize_once_rounds: the same for what one pass for both copies of a tensor saves.
        tie: candidates within this share of the fastest are equal to it.
        seed: of the draws.
        keep_tails: operands are drawn with the tails that were learnt (statistics/tails.py), which takes two to
            three times as long; without, they are Gaussian (docs/depth.md says where that is enough).
    """

    rows: int = 256
    min_draws: int = 4
    max_draws: int = 16
    interval_db: float = 0.25
    interval_share: float = 0.0025
    max_rounds: int = MAX_ROUNDS
    search_rounds: int = 21
    quantize_once_rounds: int = named("sharing_rounds", 15)
    tie: float = TIE
    seed: int = 0
    keep_tails: bool = False

    def __post_init__(self) -> None:
        least = {"rows": 1, "min_draws": 2, "max_rounds": 1, "search_rounds": 1, "quantize_once_rounds": 1}
        require_least(self, least)
        if self.max_draws < self.min_draws:
            raise ValueError(f"max_draws is {self.max_draws}, less than min_draws, which is {self.min_draws}")
        for name in ("interval_db", "interval_share", "tie"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it has to be finite and not negative")


# A third of the default's time: for prototypes, and where the clock sets what can be measured.
COARSE = Settings(max_rounds=9, search_rounds=9, quantize_once_rounds=9, max_draws=4)
