"""Trains by a plan in a fork for each folder that it is told, so that each can be killed.

What every process would do first (imports, self-checks of kernels) is done once, before the first fork.
In: folders. Out: `pid N`, `step N` after each, `end {..}` where it gets that far, `gone`.
"""

import json
import os

import torch
from fp8_run import CONFIG, digest, make_plan, tower
from small_run import RandomRows

from loka.planner import convert
from loka.train import load_newest, train
from loka.train.checkpointing.state import plan_in


def serve(client, steps):
    torch.set_num_threads(1)
    plan = make_plan()
    convert(tower(), plan)
    while True:
        try:
            folder = client.recv()
        except EOFError:
            return
        if not (pid := os.fork()):
            client.send(f"pid {os.getpid()}")
            run(folder, plan, steps, client.send)
            os._exit(0)
        os.waitpid(pid, 0)
        client.send("gone")


def run(folder, plan, steps, say):
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
    said = {"resumed": result.resumed_from, "state": digest(end.state), "reading": repr(result.reading)}
    say(f"end {json.dumps(said)}")
