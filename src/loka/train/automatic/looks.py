"""Effects of a model while it trains, from rows ahead of it, and how far they move.

Sampled steps would tell that too. But where they are expensive there are only two of them, one of a model that had
learnt nothing yet: between those, effects of Wukong 2 GF moved by a factor of 1e8. A look is of one model, at a known
step, from 1,536 rows.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from loka.core.exchange import rank_of
from loka.core.numerics.effect import Effect
from loka.core.numerics.label_rate import Shares
from loka.core.records.stats import Stats
from loka.core.storage.codec import record
from loka.probe.model_effects.movement import Horizon
from loka.train.automatic.as_it_is import batches_needed, effect_lines, renew
from loka.train.run import Run
from loka.train.running import label_rates


@record(row=True)
@dataclass(frozen=True, kw_only=True)
class Look:
    """The effects of a model at a step, by site and recipe."""

    step: int
    effects: Mapping[str, Mapping[str, Effect]]


def look_at(stats: Stats) -> Look:
    return Look(step=stats.steps, effects={path: layer.effects for path, layer in stats.layers.items()})


def next_look(looks: Sequence[Look], first: int) -> int:
    """The step of the next look: `first`, and then always twice as many steps."""
    return 2 * looks[-1].step if looks else first


def renewed(
    run: Run, stats: Stats, looks: Sequence[Look], *, until: int, base_rate: Shares | None, say: Callable[[str], None]
) -> Stats:
    """`stats` with effects of the model as it is, from the next rows, to hold until a later step. How far they will
    move follows from the last look at half of the steps, or fewer. Rows of a second epoch are not fresh: then it
    returns `stats` as they are.
    """
    batches = list(itertools.islice(run.unused(), batches_needed(run.config.batch_size)))
    if not batches:
        say("effects on KL/H are those of sampled steps: no row is left that was not trained on")
        return stats
    began, horizon = time.perf_counter(), Horizon.of_probe(stats, until=until)
    before = next((look for look in reversed(looks) if 2 * look.step <= stats.steps), None)
    if before is not None:
        layers = {path: replace(one, effects=before.effects.get(path, {})) for path, one in stats.layers.items()}
        stats, horizon = replace(stats, layers=layers), replace(horizon, earlier=before.step)
    found = renew(
        run.model,
        stats,
        batches,
        config=run.config,
        base_rate=base_rate or label_rates(run.running.state_dict()),
        horizon=horizon,
        tasks=run.tasks,
        seed=rank_of(),
    )
    for line in effect_lines(found, time.perf_counter() - began):
        say(line)
    return found
