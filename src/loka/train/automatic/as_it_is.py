"""Statistics of a model as it is, from the rows of a reader: nothing is trained.

`learn` watches forward and backward passes without a step of an optimizer, and `renew` takes effects on KL/H from fresh
rows (probe/model_effects/renewal.py). Both call the model as training does, at its precision, but in eval mode.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from loka.core.budget import total_effect, upper_bound
from loka.core.exceptions import DataRefused
from loka.core.numerics.label_rate import BaseRate, LabelRate
from loka.core.records.drift import effects_of
from loka.core.records.stats import Stats
from loka.data.batch import Batch, Source, tasks_of
from loka.probe import Probe, renew_effects
from loka.probe.model_effects.movement import Horizon
from loka.probe.model_effects.renewal import PER_BATCH, SAMPLES
from loka.probe.model_effects.untouched import as_evaluated
from loka.train.config import TrainConfig
from loka.train.metrics import Quality
from loka.train.running import Reading
from loka.train.steps.forward import arguments, matrix_precision, predict, tasks_in

_WATCHED_BATCHES = 16
_REFERENCE = "rowwise_e4m3"  # the recipe whose effects have to be known


@dataclass(frozen=True)
class Divided:
    """The segments of the rows of a source. `places` int64 [N] is, for each row in order, its index in `names`."""

    names: tuple[str, ...]
    places: torch.Tensor

    @property
    def of(self) -> Callable[[Any], torch.Tensor]:
        """Of a batch with its places, as `renew` hands them on."""
        return lambda pair: pair[1]


def batches_needed(batch_size: int) -> int:
    """How many batches a renewal reads at most: 8, or, where batches are small, as many as hold the rows that it needs.

    One row of a batch is left out, as probe/model_effects/sensitivity.py says.
    """
    return max(SAMPLES // PER_BATCH, -(-SAMPLES // max(batch_size - 1, 1)))


def rate_of(reading_by_task: Mapping[str, Reading]) -> BaseRate:
    """The labels that were counted; of several tasks, one count for each."""
    rates = tuple(_counted(reading.lifetime) for reading in reading_by_task.values())
    return rates[0] if len(rates) == 1 else rates


def _counted(quality: Quality) -> LabelRate:
    return LabelRate(positives=round(quality.base_rate * quality.rows) if quality.rows else 0, rows=quality.rows)


def renew(
    model: nn.Module,
    stats: Stats,
    batches: Iterable[Batch],
    *,
    config: TrainConfig,
    base_rate: BaseRate | None,
    horizon: Horizon | None = None,
    tasks: Sequence[str] = (),
    segments: Divided | None = None,
    seed: int = 0,
) -> Stats:
    """`stats` with effects of the model as it is; see `renew_effects`. Reads `batches_needed` at most, and
    takes more rows of each where there are fewer. `tasks` are names, and count where they are several; with
    `segments`, of these rows, it reads on until each of them has enough."""
    device = torch.device(config.device)

    def forward(model: nn.Module, pair: tuple[Batch, torch.Tensor]) -> torch.Tensor:
        batch = pair[0]
        return predict(model, arguments(batch.to(device)), config.precision, tasks=tasks_in(batch))

    def with_places() -> Iterator[tuple[Batch, torch.Tensor]]:
        at = 0
        for batch in batches:
            places = (
                torch.full((len(batch),), -1, device="cpu") if segments is None else segments.places[at:][: len(batch)]
            )
            yield batch, places
            at += len(batch)

    pairs = with_places()
    few = list(itertools.islice(pairs, batches_needed(config.batch_size)))
    with matrix_precision(config.precision, device):
        return renew_effects(
            model,
            stats,
            few if segments is None else itertools.chain(few, pairs),
            logits=as_they_are,
            base_rate=base_rate,
            forward=forward,
            horizon=horizon,
            tasks=tasks if len(tasks) > 1 else (),
            segments=segments,
            labels=lambda pair: pair[0].label,
            per_batch=-(-SAMPLES // max(len(few), 1)),
            seed=seed,
        )


def learn(
    model: nn.Module,
    source: Source,
    *,
    config: TrainConfig,
    base_rate: BaseRate | None,
    segments: Divided | None = None,
) -> Stats:
    """Statistics and effects of `model`, which is left as it was, from the first rows of `source`.

    16 batches show what flows through the sites and `batches_needed` others the effects; where there are
    fewer, in that ratio.

    Raises DataRefused for fewer than two batches.
    """
    device = torch.device(config.device)
    model.to(device)
    wanted = _WATCHED_BATCHES + batches_needed(config.batch_size)
    every = source.batches(config.batch_size)
    batches = list(itertools.islice(every, wanted))
    watched = len(batches) * _WATCHED_BATCHES // wanted
    if not watched:
        raise DataRefused(
            f"{source.rows} rows are fewer than two batches of {config.batch_size}",
            why=["statistics come from other rows than effects on KL/H"],
            way_out="give more rows, or a smaller --batch-size",
        )
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    with (
        matrix_precision(config.precision, device),
        as_evaluated(model),
        Probe(model, every=1, effect_samples=0, seed=config.seed) as probe,
    ):
        for batch in _on(device, batches[:watched]):
            logits = predict(model, arguments(batch), config.precision, tasks=tasks_in(batch))
            loss = functional.binary_cross_entropy_with_logits(logits, batch.label, reduction="sum")
            torch.autograd.grad(loss / len(batch), weights, allow_unused=True)  # `.grad` is the caller's
    if segments is not None:
        segments = replace(segments, places=segments.places[watched * config.batch_size :])
    return renew(
        model,
        probe.stats(),
        itertools.chain(batches[watched:], every if segments is not None else ()),
        config=config,
        base_rate=base_rate,
        tasks=tasks_of(source),
        segments=segments,
        seed=config.seed,
    )


def effect_lines(stats: Stats, seconds: float) -> list[str]:
    """Lines for the user: from how many rows the effects come, and which effects are not known."""
    renewed = [layer for layer in stats.layers.values() if layer.effects and not layer.no_effect]
    rows = max((effect.count for layer in renewed for effect in layer.effects.values()), default=0)
    lines = [
        f"effects on KL/H: of {len(renewed)} of {len(stats.layers)} sites from {rows:.0f} rows that training "
        f"has not used, on the model as it is; {seconds:.1f} s"
    ]
    lines += map(str, stats.parts.values())
    return lines + [f"no new effect on KL/H of {which}: {reason}" for reason, which in stats.without_effect().items()]


def relative_width(stats: Stats) -> float | None:
    """What a budget is charged for the effects of all layers together, divided by the estimate; None while it is not
    known.
    """
    effects = [found[_REFERENCE] for found in effects_of(stats).values() if _REFERENCE in found]
    total = total_effect(effects)
    return upper_bound(total) / total.value if effects and total.value > 0 else None


def as_they_are(output: Any) -> Any:
    """The logits themselves: models that `train` accepts return logits, so nothing has to be guessed."""
    return output


def _on(device: torch.device, batches: Iterable[Batch]) -> Iterator[Batch]:
    for batch in batches:
        yield batch.to(device)
