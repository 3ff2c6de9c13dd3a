"""In which order a measurement goes, so that a limited time buys the most: what multiplies most comes first.

    size = rows * in_features * out_features * GEMMs       of a layer; of several, their sum

Chains and stacks of cross layers come first, where FP8 gains most, from the largest on: errors and times of
their layers, by which the kernels inside are chosen, then the whole. Then the other layers. Each is done
before the next begins, because what has no time stays in high precision. Equal sizes go as the model calls
them, so those of one shape, which share their times, stand together.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from loka.core.cross_record import Whole
from loka.core.stats import Stats
from loka.probe.sites import gemms_of


class Job(NamedTuple):
    """`name` is a layer's path, or of "whole" the name of a chain or stack."""

    kind: Literal["errors", "times", "turned", "whole"]
    name: str


def agenda(stats: Stats, wholes: Sequence[Whole], turned: Collection[str] = (), *, timed: bool) -> list[Job]:
    """Every layer of `stats` and each of `wholes` once; errors alone where nothing is timed.

    `wholes` are those all of whose layers are in `stats`; `turned` are the layers over tokens to be timed in
    both forms.
    """

    def size(paths: Sequence[str]) -> int:
        return sum(_size(stats, path) for path in paths)

    units: list[tuple[tuple[str, ...], Job | None]] = [
        (whole.linears, Job("whole", whole.name)) for whole in sorted(wholes, key=lambda w: -size(w.linears))
    ]
    units += [((path,), None) for path in sorted(stats.layers, key=lambda path: -size([path]))]
    jobs: dict[Job, None] = {}  # a layer may be in a whole: its first place counts
    for paths, together in units:
        jobs.update((Job("errors", path), None) for path in paths)
        if timed:
            jobs.update((Job("times", path), None) for path in paths)
            jobs.update((Job("turned", path), None) for path in paths if path in turned)
            jobs.update([(together, None)] if together else [])
    return list(jobs)


def _size(stats: Stats, path: str) -> int:
    layer, shape = stats.layers[path], stats.model.layers[path]
    return layer.rows * shape.in_features * shape.out_features * len(gemms_of(path, layer)[0])
