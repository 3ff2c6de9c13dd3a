"""Models as people write them, trained and served: LoKA by plan against compiled bf16.

    python benchmarks/regions/regions.py --gate --device cpu --tiny     # everything but the times

README.md beside this file has the other commands.

A cell is a model and a batch. Its arms are bf16 compiled whole, bf16 compiled block by block, LoKA as a user
runs it (Probe, measure, plan, convert, torch.compile of the whole), and torchao's recipes. Forward and
backward, or a served forward, of each under a CUDA graph, all in turns in one process. A line of JSON a cell
is written when the cell is done; the same command goes on with those that are missing.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from arms import ARMS, BF16, CANDIDATES, INT8, ON_CPU, OURS, How, build, missing, plan_of
from cells import CELLS, Cell
from forecast import forecast
from records import append, differences, read
from running import conditions, measure_cell, planned, require_known, run_ahead, tell
from table import table

import loka
from loka.core.exceptions import first_line
from loka.measurement.settings import COARSE, Settings


def main() -> None:
    arguments = _arguments()
    cells = [CELLS[name] for name in arguments.cells or CELLS if not arguments.gate or CELLS[name].gate]
    if arguments.list:
        for cell in cells:
            print(f"{cell.name:40}{'gate' if cell.gate else ''}")
        return
    if arguments.table:
        if not arguments.out.exists():
            sys.exit(f"{arguments.out}: there is no such file; --out names the one that a run wrote")
        known = read(arguments.out)
        print(table(known[cell.name] for cell in cells if cell.name in known))
        return
    names, how = _names(arguments), _how(arguments)
    if arguments.forecast:
        if arguments.compile_ahead and not arguments.compile_only:
            _compile_ahead(cells, arguments.compile_ahead)
        torch._inductor.config.autotune_local_cache = not arguments.compile_only
        for cell in cells:
            try:
                forecast(cell, how, rounds=0 if arguments.compile_only else arguments.rounds)
            except Exception as error:  # a compiler raises what it likes; others may do
                tell(f"{cell.name}: no forecast: {first_line(error)}")
        return
    if arguments.compile_only:
        for cell in cells:
            _compile(cell, names, how)
        return
    known = {} if arguments.again else read(arguments.out)
    cells = [cell for cell in cells if not _finished(known.get(cell.name), names, how, arguments)]
    print(f"{len(cells)} cells to do: {', '.join(cell.name for cell in cells)}", flush=True)
    if arguments.plan_only:
        for cell in cells:
            tell(f"{cell.name}: {planned(cell, how)[0]}")
        return
    if arguments.compile_ahead:
        _compile_ahead(cells, arguments.compile_ahead)
    began = time.monotonic()
    for number, cell in enumerate(cells, 1):
        if arguments.stop_after and time.monotonic() - began > arguments.stop_after:
            tell(f"time is up, {len(cells) - number + 1} cells are left; the same command goes on")
            break
        tell(f"{cell.name} ({number} of {len(cells)})")
        record = measure_cell(cell, names, how, rounds=arguments.rounds, kernels=arguments.kernels)
        append(arguments.out, record)
        print(table([record]), flush=True)
        if record["fatal"]:
            sys.exit(f"CUDA is unusable after {cell.name}; the same command goes on behind it")


def _compile(cell: Cell, names: Sequence[str], how: How) -> None:
    """Fills the compile caches with what the arms of a cell will ask for; LoKA's where its plan is there.

    Which of a kernel's layouts is fastest is for the process that times: here others share the GPU.
    """
    torch._inductor.config.autotune_local_cache = False
    for name in names:
        there = how.plans is not None and (how.plans / f"{cell.name}.plan.json").exists()
        if missing(name) or (name in OURS and not there):
            continue
        try:
            torch._dynamo.reset()
            arm = build(name, cell, how, plan_of(cell, how)[0] if name in OURS else None)
            arm.step()
        except Exception as error:
            print(f"{cell.name}, {name}: {first_line(error)}", flush=True)


def _compile_ahead(cells: Sequence[Cell], together: int) -> None:
    given = [argument for argument in sys.argv[1:] if argument != "--gate"]
    waiting = [[sys.executable, __file__, *given, "--compile-only", "--cells", cell.name] for cell in cells]
    run_ahead(waiting, together)


def _finished(record: Any, names: Sequence[str], how: How, arguments: argparse.Namespace) -> bool:
    """Whether a record holds all that is asked for, failures included (but not with --retry)."""
    if record is None:
        return False
    if others := differences(record, conditions(how)):
        tell(f"{record['cell']} is measured anew: its line in {arguments.out} is of other {', '.join(others)}")
        return False
    if arguments.retry and any("traceback" in record["arms"].get(name, {}) for name in names):
        return False
    if arguments.kernels and "kernels" not in record:
        return False
    return record["fatal"] or all(name in record["arms"] for name in names)


def _names(arguments: argparse.Namespace) -> list[str]:
    usual = [name for name in ARMS if name != INT8]
    wanted = BF16 if arguments.baseline_only else arguments.arms or usual
    return [name for name in ARMS if name in wanted]


def _how(arguments: argparse.Namespace) -> How:
    on_cpu = arguments.device == "cpu"
    candidates = tuple(arguments.candidates or (ON_CPU if on_cpu else CANDIDATES))
    return How(
        device=torch.device(arguments.device),
        tiny=arguments.tiny,
        mode=arguments.mode,
        candidates=None if candidates == ("all",) else candidates,
        settings=Settings() if arguments.fine else COARSE,
        probe_steps=arguments.probe_steps,
        force=dict(arguments.force),
        budget=loka.Budget(ne=None, min_speedup=arguments.min_speedup),
        plans=arguments.plans,
        timings=arguments.timings,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_argument_group("what")
    which.add_argument("--cells", type=_listed(CELLS), help="names, with commas between")
    which.add_argument("--gate", action="store_true", help="only the cells that decide")
    which.add_argument("--arms", type=_listed(ARMS), help=f"some of {','.join(ARMS)}")
    which.add_argument("--baseline-only", action="store_true", help="bf16 alone")
    which.add_argument("--forecast", action="store_true", help="of deep models, from shallow ones")
    which.add_argument("--kernels", action="store_true", help="profile a replay of each arm")
    which.add_argument("--list", action="store_true", help="name the cells and stop")
    which.add_argument("--table", action="store_true", help="print --out as markdown and stop")
    how = parser.add_argument_group("how")
    how.add_argument("--mode", choices=("autocast", "bf16"), default="autocast")
    how.add_argument("--rounds", type=_rounds, default=21)
    how.add_argument("--device", default="cuda")
    how.add_argument("--tiny", action="store_true", help="small numbers in place of the real ones")
    how.add_argument("--min-speedup", type=float, default=1.0, help="of the budget, for each site by itself")
    how.add_argument("--candidates", nargs="+", help="to measure, or all")
    how.add_argument("--fine", action="store_true", help="measure by the default settings, not the coarse ones")
    how.add_argument("--probe-steps", type=int, default=2)
    how.add_argument("--force", nargs="*", default=[], type=_pair, metavar="SITES=CANDIDATE", help="over the plan")
    where = parser.add_argument_group("where, and in what pieces")
    where.add_argument("--out", type=Path, default=Path("regions.jsonl"))
    where.add_argument("--plans", type=Path, help="folder of plans: those there are used, others written")
    where.add_argument("--timings", type=Path, help="folder of timings that measuring keeps")
    where.add_argument("--plan-only", action="store_true", help="write plans and stop")
    where.add_argument("--compile-ahead", type=int, default=0, metavar="N", help="in N processes at a time")
    where.add_argument("--compile-only", action="store_true", help="fill the compile caches and stop")
    where.add_argument("--stop-after", type=float, metavar="SECONDS", help="begin no further cell then")
    where.add_argument("--again", action="store_true", help="also what is done")
    where.add_argument("--retry", action="store_true", help="also what failed")
    arguments = parser.parse_args()
    if arguments.plan_only and arguments.plans is None:
        parser.error("--plan-only writes into --plans")
    if not (arguments.list or arguments.table):
        require_known(parser, arguments.device)
    return arguments


def _rounds(text: str) -> int:
    if (rounds := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{rounds}: a race takes one round at least")
    return rounds


def _pair(text: str) -> tuple[str, str]:
    sites, equals, candidate = text.partition("=")
    if not (sites and equals and candidate):
        raise argparse.ArgumentTypeError(f"{text}: write SITES=CANDIDATE, such as '*=torch_fast:rowwise_e4m3'")
    return sites, candidate


def _listed(known: Sequence[str] | dict[str, Cell]) -> Any:
    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
        return names

    return parse


if __name__ == "__main__":
    main()
