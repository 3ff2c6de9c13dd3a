"""Effects of several records in one.

    effects of the same recipe at a site add up        where its error is that of the same quantizer in both parts

A centred recipe takes a vector m off the input and a hot one some columns' residuals: both come from the statistics,
a plan fixes them, and a part's effects are by its own. Merged statistics tell another m and other columns. Of windows
whose means lay ten deviations apart the sum of both parts' effects said 1.2e-5 where the layer lost 2.7e-4. So effects
of these recipes go, unless all parts have the m and the columns of the merged one, as ranks do that renew by what they
share (`with_means_of`).
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from loka.core.numerics.effect import NO_PROMISE, OTHER_PARTS, Effect, merged
from loka.core.recipe import Cast
from loka.core.records.stats import LinearStats, Stats
from loka.probe.layer_stats import with_effects, without_effects
from loka.statistics.effect_casts import CASTS, LEARNING
from loka.statistics.effect_depths import centre_of_input, columns_in, hot_of, is_centred, tables_of

_IN_A_PART = " (so says a part that was merged: leave it out, or renew_effects after merging)"


def with_merged_effects(both: LinearStats, a: LinearStats, b: LinearStats) -> LinearStats:
    """`both`, a layer merged from `a` and `b` in all else, with their effects.

    Where one of the parts refuses any promise, the rows of both allow none.
    """
    refused = [part.no_effect for part in (a, b) if not part.effects and part.no_effect.startswith(NO_PROMISE)]
    if refused:
        other = a.effects or b.effects
        return without_effects(both, refused[0].removesuffix(_IN_A_PART) + (_IN_A_PART if other else ""))
    apart = _apart(both, a, b)
    effects = _without(merged(a.effects, b.effects), apart)
    known = [part.no_effect for part in (a, b) if part.effects and part.no_effect]
    lost = bool(apart) or any(reason.startswith(OTHER_PARTS) for reason in known)
    older = [reason for each in known if (reason := each.removeprefix(OTHER_PARTS).removeprefix("; "))]
    reasons = [OTHER_PARTS] * lost + older[:1]
    both = replace(
        both,
        effects=effects,
        no_effect="; ".join(reasons) if a.effects or b.effects else a.no_effect or b.no_effect,
        effects_by_part={
            name: _without(merged(a.effects_by_part.get(name, {}), b.effects_by_part.get(name, {})), apart)
            for name in {**a.effects_by_part, **b.effects_by_part}
        },
    )
    return _without_centred_histograms(both) if any(CASTS[name][0].centred for name in apart) else both


def with_means_of(own: Stats, whole: Stats) -> Stats:
    """`own` with means and hot columns of `whole`, by which effects that are renewed from it then are.

    `whole` is merged from `own` and others. Effects that it dropped are dropped here too.
    """
    return replace(own, layers={path: _with_means_of(layer, whole.layers[path]) for path, layer in own.layers.items()})


def with_effects_of(whole: Stats, found: Stats) -> Stats:
    """`whole` with the effects of `found`, merged from what was renewed by its means (`with_means_of`)."""
    layers = {}
    for path, layer in whole.layers.items():
        fresh = found.layers[path]
        tables = {**tables_of(fresh), **columns_in(tables_of(layer))}
        layer = with_effects(without_effects(layer, ""), dict(fresh.effects), tables, fresh.no_effect)
        layers[path] = replace(layer, effects_by_part=fresh.effects_by_part)
    return replace(whole, layers=layers, parts=found.parts, alike=found.alike, not_clicks=found.not_clicks)


def _apart(both: LinearStats, *parts: LinearStats) -> frozenset[str]:
    """The recipes whose effects are by other means or columns than those of `both`, or went from a part for that: what
    is left of them would be of the other's rows alone, of which rows by the order of merging."""
    casts = {CASTS[name][0] for name in LEARNING}
    other = {left for left in casts for part in parts if part.effects and not _alike(left, part, both)}
    found = {name for part in parts for name in part.effects}
    before = [part.effects.keys() for part in parts if part.effects and part.no_effect.startswith(OTHER_PARTS)]
    gone = {name for known in before for name in LEARNING - known}
    return frozenset(name for name in LEARNING & found if CASTS[name][0] in other or name in gone)


def _alike(left: Cast, one: LinearStats, other: LinearStats) -> bool:
    if left.centred and not torch.equal(centre_of_input(one), centre_of_input(other)):
        return False
    if not left.hot:
        return True
    columns, others = hot_of(one, left), hot_of(other, left)
    if columns is None or others is None:
        return columns is others
    return torch.equal(columns[0], others[0])


def _without(effects: Mapping[str, Effect], names: Collection[str]) -> dict[str, Effect]:
    return {name: effect for name, effect in effects.items() if name not in names}


def _without_centred_histograms(layer: LinearStats) -> LinearStats:
    """They are of x - m, of more than one m."""
    operands = {
        operand: replace(found, tensors={name: t for name, t in found.tensors.items() if not is_centred(name)})
        for operand, found in layer.operands.items()
    }
    return replace(layer, operands=operands)


def _with_means_of(own: LinearStats, whole: LinearStats) -> LinearStats:
    without = without_effects(whole, "").operands
    shared = replace(own, operands={**own.operands, "input": without["input"], "weight": without["weight"]})
    known = tables_of(whole)
    tables = {name: table for name, table in tables_of(own).items() if name in known} | columns_in(known)
    return replace(
        with_effects(shared, {}, tables, ""),
        effects={name: effect for name, effect in own.effects.items() if name in whole.effects},
        effects_by_part={
            part: {name: effect for name, effect in effects.items() if name in whole.effects_by_part.get(part, {})}
            for part, effects in own.effects_by_part.items()
        },
        no_effect=own.no_effect if own.effects.keys() <= whole.effects.keys() else whole.no_effect,
    )
