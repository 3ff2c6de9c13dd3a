"""What a layer takes in a region by where it stands there: at an end, or between others.

    time(ends) = cell + 4/3 (1 - ends / 2) (chain - cell)

A region's ends cost more than what lies between its layers (measurement/times/region_times.py). A layer timed by
itself has both; of a chain of four each layer has a fourth of them: cell = inner + both, chain = inner + both / 4. An
end counts half to the layer that has it, on the side where none that feeds it, or that it feeds, is `joined`.
"""

from collections.abc import Collection, Mapping

from loka.core.error import Estimate
from loka.core.records.report import CHAINED, HP, Measurement, Report


def times_at(report: Report, path: str, joined: Collection[str]) -> Mapping[str, Measurement]:
    """Of a layer by arm, as `Report.region_times`, in a region with those of its neighbours that are `joined`."""
    cell, chain = report.region_times.get(path, {}), report.times_in_chains.get(path, {})
    ends = ends_of(report.reads, path, joined)
    if ends == 2 or not _timed(cell, HP) or not _timed(chain, HP):
        return cell
    share = (1 - ends / 2) * CHAINED / (CHAINED - 1)  # of the chain's time; the rest is the cell's, below zero too
    both = [arm for arm in cell if _timed(cell, arm) and _timed(chain, arm)]
    placed = {arm: _mixed(_microseconds(cell, arm), _microseconds(chain, arm), share) for arm in both}
    if not all(time.low > 0 for time in placed.values()):  # the two contradict each other
        return cell
    return {**cell, **{arm: _measurement(time, placed[HP].value, arm) for arm, time in placed.items()}}


def not_neighbours(reads: Mapping[str, Collection[str]], paths: Collection[str]) -> list[str]:
    """Those of `paths`, by name, of which none feeds another: each first one keeps out its neighbours."""
    taken: list[str] = []
    for path in sorted(paths):
        if ends_of(reads, path, taken) == 2:
            taken.append(path)
    return taken


def ends_of(reads: Mapping[str, Collection[str]], path: str, joined: Collection[str]) -> int:
    """How many of a layer's two sides have no neighbour that is `joined`."""
    fed = any(other in joined for other in reads.get(path, ()))
    feeds = any(path in reads.get(other, ()) for other in joined)
    return 2 - fed - feeds


def _timed(times: Mapping[str, Measurement], arm: str) -> bool:
    return arm in times and times[arm].microseconds is not None and (arm == HP or times[arm].speedup is not None)


def _microseconds(times: Mapping[str, Measurement], arm: str) -> Estimate:
    hp = times[HP].microseconds
    assert hp is not None
    found = hp if arm == HP else times[arm].beside(hp)
    assert found is not None
    return found


def _mixed(cell: Estimate, chain: Estimate, share: float) -> Estimate:
    value, rest = (1 - share) * cell.value + share * chain.value, 1 - share
    low, high = (cell.low, cell.high) if rest >= 0 else (cell.high, cell.low)
    return Estimate(value, rest * low + share * chain.low, rest * high + share * chain.high)


def _measurement(time: Estimate, hp: float, arm: str) -> Measurement:
    return Measurement(microseconds=time, speedup=None if arm == HP else time.under(hp))
