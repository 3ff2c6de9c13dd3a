"""What is known of a site's effects over the sampled steps, in which earlier samples fade."""

from __future__ import annotations

from dataclasses import dataclass

from loka.core.numerics.effect import Effect, merged
from loka.statistics.effect_depths import Tables, faded_tables, merge_tables


@dataclass(frozen=True)
class Known:
    """`reached`: whether a gradient other than 0 is among the samples."""

    effects: dict[str, Effect]
    tables: Tables
    reached: bool

    @property
    def count(self) -> float:
        return max((effect.count for effect in self.effects.values()), default=0)

    def faded(self, factor: float) -> Known:
        effects = {name: effect.faded(factor) for name, effect in self.effects.items()}
        return Known(effects, faded_tables(self.tables, factor), self.reached and factor > 0)


def joined_samples(before: Known | None, fresh: Known, limit: int) -> Known:
    """Both, the earlier samples faded so that all together weigh `limit` at most."""
    if before is None or not before.count:
        return fresh
    faded = before.faded(min(max(limit - fresh.count, 0) / before.count, 1.0))
    try:
        effects = merged(faded.effects, fresh.effects)
    except ValueError:  # another number of tasks: what came before was of another output
        return fresh
    return Known(effects, merge_tables(faded.tables, fresh.tables), faded.reached or fresh.reached)
