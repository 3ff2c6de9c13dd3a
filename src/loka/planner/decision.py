"""Makes a decision for a site from what a report says of a candidate."""

from collections.abc import Mapping

from loka.core.records.plan import Decision
from loka.core.records.report import HP, Measurement, SiteReport


def decision_of(site: SiteReport, candidate: str, reason: str, rejected: Mapping[str, str]) -> Decision:
    measured = site.measurements.get(candidate, Measurement())
    errors = (site.measured(candidate) or measured).errors
    hp = site.measurements.get(HP, Measurement())
    return Decision(
        path=site.path,
        problem=site.problem,
        candidate=candidate,
        reason=reason,
        sqnr_db=errors.get("sqnr_db"),
        mere=errors.get("mere"),
        kl=errors.get("ne"),
        microseconds=(hp.microseconds and measured.beside(hp.microseconds)) or measured.microseconds,
        hp_microseconds=hp.microseconds,
        speedup=measured.speedup,
        rejected=rejected,
        kl_by_part=(site.measured(candidate) or measured).kl_by_part,
    )


def saved_us(decision: Decision) -> float:
    """Of what the site takes in hp; 0 where it was not timed."""
    if decision.candidate == HP or not decision.microseconds or not decision.hp_microseconds:
        return 0.0
    return decision.hp_microseconds.value - decision.microseconds.value + decision.saved_us
