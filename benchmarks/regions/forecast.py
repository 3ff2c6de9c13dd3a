"""A compiled, graphed step told from shallower ones (loka/scaling/depth.py), against its own time."""

from typing import Any

import torch
from arms import LOKA, WHOLE, How, build, plan_of
from cells import Cell
from models import DCNv2
from race import Arms
from running import tell

from loka.core.timing import median_interval
from loka.scaling.depth import carried_on


def forecast(cell: Cell, how: How, *, rounds: int) -> None:
    """Without rounds everything is compiled, and nothing timed."""
    depth = _cut(cell.model(torch.device("cpu"), tiny=how.tiny), None)
    few = min(2, depth - 2)
    if few < 1:
        tell(f"{cell.name}: no forecast: it has no three layers in a row that are alike but for the first")
        return
    plan, arms = plan_of(cell, how)[0], Arms(how.device)
    for at in sorted({depth, few + 1, few}, reverse=True):
        for name in (WHOLE, LOKA):
            torch._dynamo.reset()
            arm = build(name, cell, how, plan)
            _cut(arm.model, at)  # it compiles in its first step
            arms.add(f"{name} {at}", arm.step, arm.leaves)
            tell(f"{cell.name}, {name}: {at} of {depth} layers ready")
    times = arms.race(baseline=f"{WHOLE} {depth}", rounds=rounds).samples if rounds else {}
    for name in (WHOLE, LOKA) if rounds else ():
        us = median_interval(times[f"{name} {depth}"])
        told = carried_on({at: times[f"{name} {at}"] for at in (few, few + 1)}, depth)
        tell(f"{cell.name}, {name}: told {told}, measured {us} us: {100 * (told.value / us.value - 1):+.1f} %")
    arms.close()


def _cut(model: Any, depth: int | None) -> int:
    """Down to `depth` layers; how many there are, 0 where those behind the first are not alike."""
    if isinstance(model, DCNv2):
        model.cross.layers = depth or model.cross.layers
        return model.cross.layers
    layers = getattr(model, "layers", getattr(model, "blocks", ()))
    kinds = {(type(layer), *(p.shape for p in layer.parameters())) for layer in layers[1:]}
    if len(kinds) != 1:
        return 0
    del layers[depth or len(layers) :]
    return len(layers)
