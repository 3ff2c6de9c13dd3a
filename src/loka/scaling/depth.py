"""A compiled step of n layers alike from steps of a < b that were timed: t(b) + (n - b) (t(b) - t(a)) / (b - a).

GEMMs timed alone lack the code that a compiler fuses around them; shallow models have all of it.
"""

from collections.abc import Mapping, Sequence

from loka.core.error import Estimate
from loka.core.exceptions import LokaError
from loka.core.timing import median_interval


def carried_on(times: Mapping[int, Sequence[float]], depth: int) -> Estimate:
    """Microseconds at `depth`; the interval holds noise, and no error of the line.

    `times` are of two numbers of layers in the same rounds, such as `Race.samples`. Raises LokaError for others,
    and for steps that take no longer.
    """
    few, many = min(times, default=0), max(times, default=0)
    if len(times) != 2 or not 0 < few < many <= depth or len(times[few]) != len(times[many]):
        raise LokaError(
            f"steps of {list(times)} layers say nothing about {depth} layers",
            way_out="time models of two depths, equally often, such as 2 and 3 layers",
        )
    pairs = [(b, (b - a) / (many - few)) for a, b in zip(times[few], times[many], strict=True)]
    if not median_interval([each for _, each in pairs]).value > 0:
        raise LokaError("the deeper model takes no longer", way_out="time deeper models or larger batches")
    return median_interval([us + (depth - many) * each for us, each in pairs])
