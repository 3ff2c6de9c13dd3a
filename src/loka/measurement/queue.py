"""In which order a measurement goes, so that a limited time buys the most: what multiplies most comes first.

    size = rows * in_features * out_features * GEMMs       of a layer

A layer's errors and times are done before the next layer begins, because what has no time stays in high
precision. Equal sizes go as the model calls them, so those of one shape, which share their times, stand
together.
"""

from typing import Literal, NamedTuple

from loka.core.records.stats import Stats
from loka.measurement.sites import gemms_of


class Job(NamedTuple):
    kind: Literal["errors", "times", "region"]
    path: str


def jobs_of(stats: Stats, *, timed: bool) -> list[Job]:
    """What is measured of each layer, the largest layer first; errors alone where nothing is `timed`."""
    jobs = []
    for path in sorted(stats.layers, key=lambda path: -_size(stats, path)):
        jobs.append(Job("errors", path))
        if timed:
            jobs += [Job("times", path), Job("region", path)]
    return jobs


def _size(stats: Stats, path: str) -> int:
    layer, shape = stats.layers[path], stats.model.layers[path]
    return layer.rows * shape.in_features * shape.out_features * len(gemms_of(path, layer)[0])
