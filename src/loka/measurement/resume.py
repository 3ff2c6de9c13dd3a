"""Which earlier report a measurement goes on from."""

from dataclasses import replace
from pathlib import Path

from loka.core.exceptions import FileRefused
from loka.core.records.report import Report
from loka.measurement.times.layer_times import NOT_TIMED

ERRORS_ONLY = "errors_only"  # in the settings of a report that is not to have times


def continue_from(path: Path, fresh: Report) -> Report:
    """An unfinished report of the same measurement goes on; another report is replaced.

    One of errors only is an unfinished one where times are wanted, and one that was to have times stays one.

    Raises FileRefused when the file is no whole report: it may be somebody's only copy.
    """
    if not path.exists():
        return fresh
    try:
        earlier = Report.load(path)
    except FileRefused as error:
        raise FileRefused(
            f"will not overwrite {path}", why=error.why, way_out="choose another file, or remove this one"
        ) from error
    had, wanted = ({**report.settings, ERRORS_ONLY: False} for report in (earlier, fresh))
    if (earlier.stats_digest, earlier.machine, had) != (fresh.stats_digest, fresh.machine, wanted):
        return fresh
    if not earlier.settings.get(ERRORS_ONLY) or fresh.settings.get(ERRORS_ONLY):
        return earlier
    sites = {name: replace(site, unfinished=NOT_TIMED) for name, site in earlier.sites.items()}
    return replace(earlier, settings=fresh.settings, sites=sites)
