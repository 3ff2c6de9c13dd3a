"""How finely to measure."""

from __future__ import annotations

from dataclasses import dataclass

from loka.core.timing import MAX_ROUNDS, TIE


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How finely to measure.

    Attributes:
        rows: input rows drawn for the error (and contracted over in grad_weight).
        min_draws, max_draws: bounds on the number of draws of a layer's operands.
        interval_db: half-width of the `sqnr_db` interval at which drawing stops.
        max_rounds: at which the race of a site ends with what it knows (core/timing.py).
        search_rounds: the same for the race between the algorithms of one kernel.
        sharing_rounds: the same for what sharing a quantization saves.
        tie: candidates within this share of the fastest are equal to it.
        seed: of the draws.
    """

    rows: int = 256
    min_draws: int = 4
    max_draws: int = 16
    interval_db: float = 0.25
    max_rounds: int = MAX_ROUNDS
    search_rounds: int = 21
    sharing_rounds: int = 15
    tie: float = TIE
    seed: int = 0
