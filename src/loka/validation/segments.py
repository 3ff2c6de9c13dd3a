"""Segments of traffic, each with a verdict of its own. They follow from features alone, never from labels or
predictions.

A segment chosen by what a model predicts would select that model's own noise, and the other model would
look better or worse there for no reason. Features are the same for both.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from loka.core.exceptions import DataRefused, LokaError, UnknownName
from loka.core.records.row_segments import places_of
from loka.data.batch import Batch, Source
from loka.train.segments import OTHER, Segments

_MOST = 64  # of one division: more, and no interval is narrow enough to say anything

Values = npt.NDArray[np.generic]
Read = Callable[[Batch], torch.Tensor]


@dataclass(frozen=True)
class Division:
    """How rows are divided: `read` gives a value of each row [B], `split` the group [N] of each value
    with the groups' names. `name` says what it goes by."""

    name: str
    read: Read
    split: Callable[[Values], tuple[npt.NDArray[np.int64], tuple[str, ...]]]


@dataclass(frozen=True)
class Segmented:
    """The evaluation rows in segments: `group` [N] is each row's place in `names`."""

    names: tuple[str, ...]
    group: npt.NDArray[np.int64]


def dense_quantiles(feature: int, buckets: int = 4) -> Division:
    """By a dense feature, into up to `buckets` parts of about equal size; ties stay together."""

    def split(values: Values) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
        numbers = values.astype(np.float64)
        present = numbers[np.isfinite(numbers)]
        inner = np.quantile(present, np.arange(1, buckets) / buckets) if len(present) else np.zeros(0)
        edges = np.unique(inner)
        edges = edges[edges < present.max()] if len(present) else edges
        group = np.searchsorted(edges, numbers, side="left").astype(np.int64)
        bounds = ["-inf", *_told_apart(edges), "inf"]
        names = [f"dense:{feature} in ({a}, {b}]" for a, b in itertools.pairwise(bounds)]
        missing = ~np.isfinite(numbers)
        if missing.any():
            group[missing] = len(names)
            names.append(f"dense:{feature} not finite")
        return group, tuple(names)

    return Division(f"dense:{feature}", lambda batch: batch.dense[:, feature], split)


def _told_apart(edges: npt.NDArray[np.float64]) -> list[str]:
    """With as many digits, four at least, as it takes: names of segments have to differ."""
    told = ([f"{edge:.{digits}g}" for edge in edges] for digits in range(4, 18))
    return next(texts for texts in told if len(set(texts)) == len(edges))


def frequent_ids(feature: int, count: int = 4) -> Division:
    """By a sparse feature: its `count` most frequent ids, and the rest."""

    def split(values: Values) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
        ids, sizes = np.unique(values.astype(np.int64), return_counts=True)
        top = ids[np.lexsort((ids, -sizes))][:count]
        group = np.full(len(values), len(top), np.int64)
        for place, found in enumerate(top):
            group[values == found] = place
        names = [f"sparse:{feature} = {found}" for found in top]
        return group, (*names, f"sparse:{feature}, all but {count} ids") if len(ids) > count else tuple(names)

    return Division(f"sparse:{feature}", lambda batch: batch.sparse[:, feature], split)


def by_value(name: str, read: Read) -> Division:
    """By `read(batch) -> [B]`, which must not look at labels: a segment for each value."""

    def split(values: Values) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
        found, group = np.unique(values, return_inverse=True)
        if len(found) > _MOST:
            raise LokaError(
                f"{name} has {len(found)} values; at most {_MOST} segments of one division can have verdicts",
                way_out="a coarser function",
            )
        return group.astype(np.int64), tuple(f"{name} = {value}" for value in found.tolist())

    return Division(name, read, split)


def by_segments(segments: Segments) -> Division:
    """The segments that a trainer reports on (train/segments.py)."""

    def split(values: Values) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
        place = values.astype(np.int64)
        outside = (place < 0) | (place >= len(segments.names))
        names = (*segments.names, OTHER) if outside.any() else segments.names
        return np.where(outside, len(segments.names), place), names

    return Division(segments.by, functools.partial(places_of, segments), split)


def division_named(text: str, source: Source) -> Division:
    """dense:FEATURE[:BUCKETS] or sparse:FEATURE[:COUNT], features counted from 0.

    Raises UnknownName for anything else, and for a feature that `source` has not.
    """
    kind, *numbers = text.split(":")
    features = {"dense": source.dense_features, "sparse": len(source.vocab_sizes)}
    way_out = "dense:FEATURE[:BUCKETS] or sparse:FEATURE[:COUNT]; these rows have " + " and ".join(
        f"{kind}:0 to {kind}:{count - 1}" for kind, count in features.items() if count
    )
    if kind not in features or len(numbers) not in (1, 2) or not all(n.isdecimal() for n in numbers):
        raise UnknownName(f"no segments are called {text!r}", way_out=way_out)
    feature, parts = int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 4
    if feature >= features[kind]:
        raise UnknownName(f"--segment {text}: there is no such {kind} feature", way_out=way_out)
    if not 1 <= parts <= _MOST:
        raise UnknownName(f"--segment {text}: {parts} parts", way_out=f"from 1 to {_MOST}")
    return dense_quantiles(feature, parts) if kind == "dense" else frequent_ids(feature, parts)


def cluster_named(text: str, source: Source) -> int:
    """The sparse feature that sparse:FEATURE names. Raises UnknownName where there is none."""
    kind, _, number = text.partition(":")
    count = len(source.vocab_sizes)
    if kind != "sparse" or not number.isdecimal() or int(number) >= count:
        way_out = f"sparse:0 to sparse:{count - 1}" if count else "these rows have no sparse features"
        raise UnknownName(f"--cluster {text}: there is no such sparse feature", way_out=way_out)
    return int(number)


def default_divisions(source: Source) -> list[Division]:
    """Quarters of the first dense feature and the most frequent ids of the first sparse one."""
    found = [dense_quantiles(0)] if source.dense_features else []
    return [*found, *([frequent_ids(0)] if source.vocab_sizes else [])]


def divide(source: Source, divisions: Sequence[Division], *, batch_size: int) -> list[Segmented]:
    """Where each row of `source` falls, in order. Reads the rows once if there is anything to divide."""
    found = []
    reads = [(division.name, division.read) for division in divisions]
    for values, division in zip(_columns(source, reads, batch_size), divisions, strict=True):
        group, names = division.split(values)
        found.append(Segmented(names, group))
    return found


def clusters_of(source: Source, feature: int, *, batch_size: int) -> npt.NDArray[np.int64]:
    """The cluster [N] of each row by a sparse feature, such as its user: rows of one id come together.

    Id 0 is a missing or unknown value: of these nobody knows that they are one, and each is by itself.
    """
    name = f"sparse:{feature}"
    (ids,) = _columns(source, [(name, lambda batch: batch.sparse[:, feature])], batch_size)
    ids = ids.astype(np.int64)
    return np.where(ids == 0, -1 - np.arange(len(ids)), ids)


def _columns(source: Source, reads: Sequence[tuple[str, Read]], batch_size: int) -> list[Values]:
    """What each of `reads` gives of all rows, in order. Reads no row where there is nothing to read."""
    found: list[list[Values]] = [[] for _ in reads]
    for batch in source.batches(batch_size) if reads else ():
        for column, (name, read) in zip(found, reads, strict=True):
            values = read(batch)
            if values.shape != (len(batch),):
                shape = tuple(values.shape)
                raise DataRefused(f"{name} gives {shape} for a batch of {len(batch)}, not [B]")
            column.append(values.detach().cpu().numpy())
    return [np.concatenate(column) for column in found]
