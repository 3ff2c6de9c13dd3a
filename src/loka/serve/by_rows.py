"""Plans by number of rows: which sites a bucket runs in high precision.

A GEMM of a few rows ends before a cast pays; with many rows every GEMM gains. A site has one FP8 candidate, and its FP8
weight is kept once. Where the plan of a bucket has the site in high precision, the bucket multiplies by the original
weight, which is then kept beside it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from loka.core.exceptions import ServeRefused
from loka.core.recipe import Gemm
from loka.core.records.plan import Plan
from loka.core.records.report import HP, site_name
from loka.planner.convert import fp8_layers


@dataclass(frozen=True)
class ByRows:
    """`plan` has every site in FP8 that is in FP8 in some of the plans. `in_hp`: for each bucket in turn, which of
    these sites run in high precision there.
    """

    plan: Plan
    in_hp: tuple[tuple[str, ...], ...]


def by_rows(plans: Plan | Mapping[int, Plan], buckets: Sequence[int]) -> ByRows:
    """Merges one plan for all buckets, or plans that are keyed by the most rows they are for.

    A bucket takes the plan for the fewest rows that are not less than its own. All plans must be of one model.

    Raises ServeRefused for a bucket beyond all plans, and for a site with two FP8 candidates.
    """
    if isinstance(plans, Plan):
        return ByRows(plans, tuple(() for _ in buckets))
    if not plans or buckets[-1] > max(plans):
        raise ServeRefused(
            f"there is no plan for {buckets[-1]} rows",
            why=[f"plans are for up to {', '.join(map(str, sorted(plans))) or 'no'} rows"],
            way_out="name the largest bucket as the key of a plan, such as {128: small, 4096: large}",
        )
    chosen = [plans[min(rows for rows in plans if rows >= bucket)] for bucket in buckets]
    fp8 = [in_fp8(plan) for plan in chosen]
    everywhere = {path: plan for plan, found in zip(chosen, fp8, strict=True) for path in found}
    _refuse_several(buckets, fp8)
    decisions = {
        site: plan.decisions[site] for path, plan in everywhere.items() for site in [site_name(path, Gemm.OUTPUT)]
    }
    whole = replace(chosen[-1], decisions={**chosen[-1].decisions, **decisions})
    return ByRows(whole, tuple(tuple(path for path in everywhere if path not in found) for found in fp8))


def check_plans(plans: object) -> None:
    """Raises ServeRefused for anything but a plan, or plans keyed by numbers of rows."""
    if isinstance(plans, Plan):
        return
    named = plans.items() if isinstance(plans, Mapping) else [(None, plans)]
    wrong = [f"{rows!r}: {plan!r}"[:80] for rows, plan in named if type(rows) is not int or not isinstance(plan, Plan)]
    if wrong:
        raise ServeRefused(
            "there is no plan to freeze by",
            why=wrong,
            way_out="give a Plan, as Plan.load(path) reads one, or plans by numbers of rows: {128: small, 4096: large}",
        )


def buckets_by_site(buckets: Sequence[int], in_hp: Sequence[Sequence[str]]) -> dict[str, tuple[int, ...]]:
    """For each site, the buckets that run it in high precision. Sites that every bucket runs in FP8 are left out."""
    found: dict[str, tuple[int, ...]] = {}
    for bucket, names in zip(buckets, in_hp, strict=True):
        for name in names:
            found[name] = (*found.get(name, ()), bucket)
    return found


def in_fp8(plan: Plan) -> dict[str, str]:
    """The candidate of each `output` GEMM that runs in FP8, by site."""
    return {path: names[0] for path, names in fp8_layers(plan).items() if names[0] != HP}


def _refuse_several(buckets: Sequence[int], fp8: Sequence[Mapping[str, str]]) -> None:
    candidates: dict[str, dict[str, int]] = {}
    for bucket, found in zip(buckets, fp8, strict=True):
        for path, candidate in found.items():
            candidates.setdefault(path, {}).setdefault(candidate, bucket)
    several = [
        f"{path}: {', '.join(f'{name} from {bucket} rows' for name, bucket in named.items())}"
        for path, named in candidates.items()
        if len(named) > 1
    ]
    if several:
        raise ServeRefused(
            "a site keeps one FP8 weight, and these plans have several candidates for it",
            why=several,
            way_out="plan again with force={site: candidate}, such as the one for the most rows",
        )
