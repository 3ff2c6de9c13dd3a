"""Trains by a plan in a fork for each folder that it is told, so that each can be killed.

What every process would do first (imports, self-checks of kernels) is done once, before the first fork.
In: a line with a folder. Out: `pid N`, `step N` after each, `end {..}` where it gets that far, `gone`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch._dynamo  # building the first optimizer imports it, which takes as long as torch
from fp8_run import CONFIG, digest, make_plan, tower
from small_run import RandomRows

from loka.core.plan import Plan
from loka.dispatch import convert
from loka.train import load_newest, train
from loka.train.state import plan_in


def say(text: str) -> None:
    print(text, flush=True)


def run(folder: Path, plan: Plan, steps: int) -> None:
    """A process that finds a checkpoint goes on by the plan in it, and from other weights than the first."""
    found = load_newest(folder)
    by = plan_in(found.state, "given_plan") if found else plan
    model = tower(seed=1 if found else 0)
    result = train(
        model,
        RandomRows(16 * steps),
        config=CONFIG,
        plan=by,
        checkpoints=folder,
        on_step=lambda step: say(f"step {step}"),
    )
    end = load_newest(folder)
    assert end is not None
    said = {"resumed": result.resumed_from, "state": digest(end.state), "reading": repr(result.reading)}
    say(f"end {json.dumps(said)}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    plan, steps = make_plan(), int(sys.argv[1])
    convert(tower(), plan)
    for line in sys.stdin:
        if not (pid := os.fork()):
            say(f"pid {os.getpid()}")
            run(Path(line.strip()), plan, steps)
            os._exit(0)
        os.waitpid(pid, 0)
        say("gone")
