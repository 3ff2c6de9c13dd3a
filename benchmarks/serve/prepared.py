"""What is there before timing: plans by numbers of rows, servers, warm compile caches."""

import os
from argparse import Namespace
from dataclasses import replace

import torch
import torch._inductor.config
from arms import LOKA, How, build, missing, plan_of
from cells import CELLS, Cell
from living import request_of
from running import run_ahead

import loka
from loka.core.compiling import compiled_by_rows
from loka.core.records.report import HP
from loka.core.timing import first_line
from loka.serve import Server, freeze
from loka.serve.by_rows import in_fp8

Plans = dict[float, dict[int, loka.Plan]]
"""By the speed-up that a site must have to run in FP8, and by bucket."""


def cell_of(model: str, rows: int) -> Cell:
    return replace(CELLS[f"serve_{model}_2048"], rows=rows, name=f"serve_{model}_{rows}")


def plans_of(model: str, how: How, arguments: Namespace) -> Plans:
    """Of the fewest rows of `--plan-rows` that are not less than a bucket's."""
    rows = {
        bucket: min((r for r in arguments.plan_rows if r >= bucket), default=max(arguments.plan_rows))
        for bucket in sorted(arguments.buckets)
    }
    made = {each: plan_of(cell_of(model, each), how)[0] for each in sorted(set(rows.values()))}
    return {
        least: {bucket: _gaining(made[each], least) for bucket, each in rows.items()} for least in arguments.margins
    }


def _gaining(plan: loka.Plan, least: float) -> loka.Plan:
    """With sites in FP8 that gain so much, as a budget's `min_speedup` asks."""
    decisions = {
        site: d if d.speedup is None or d.speedup.low >= least else replace(d, candidate=HP)
        for site, d in plan.decisions.items()
    }
    return replace(plan, decisions=decisions)


def server_of(cell: Cell, how: How, plans: dict[int, loka.Plan], *, race: bool = False) -> Server:
    model = cell.model(how.device, tiny=how.tiny).bfloat16().eval()
    requests, _ = replace(cell, rows=512).batch(how.device, tiny=how.tiny)
    return freeze(model, plans, calibration=[requests], buckets=sorted(plans), race=race)


def warm(model: str, how: How, arguments: Namespace) -> None:
    """Fills the compile caches for one arm and one bucket.

    Which of a kernel's layouts is fastest is for the process that times: here others share the GPU.
    """
    torch._inductor.config.autotune_local_cache = False
    name, (rows,) = arguments.warm, arguments.buckets
    cell = cell_of(model, rows)
    try:
        if name != LOKA:
            build(name, cell, how, None).step()
        else:
            (plans,) = plans_of(model, how, arguments).values()
            if in_fp8(plans[rows]):
                server_of(cell, how, plans)
                return
            plain = cell.model(how.device, tiny=how.tiny).bfloat16().eval().requires_grad_(False)
            with torch.no_grad():
                compiled_by_rows(plain)(*request_of(cell, how, rows))
    except Exception as error:
        print(f"{model}, {name}, {rows}: {first_line(error)}", flush=True)


def before_plans(arguments: Namespace) -> list[list[str]]:
    return [
        ["--warm", name, "--buckets", str(rows)]
        for rows in arguments.buckets
        for name in arguments.arms
        if not missing(name)
    ]


def by_plans(plans: Plans) -> list[list[str]]:
    found = {
        (rows, *sorted(in_fp8(plan))): ["--warm", LOKA, "--buckets", str(rows), "--margins", str(least)]
        for least, by_rows in plans.items()
        for rows, plan in by_rows.items()
    }
    return list(found.values())


def compile_ahead(waiting: list[list[str]], command: list[str], at_a_time: int) -> None:
    few = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "2"}
    run_ahead([[*command, *one] for one in waiting], at_a_time, few)
