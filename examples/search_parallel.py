"""A search over plan and parallel knobs by Optuna (pip install optuna), each trial priced by `scale_across`,
as CubicML (arXiv 2409.04585) does by a learnt model. No GPU: steps are estimates, the network is assumed."""

import functools
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loka.scaling.cluster import Across, Network, scale_across
from loka.scaling.inputs import fake_mode

GPUS, ROWS, WIDTH = 1024, 8192, 4096
UNITS = {"stage": "[0-3]", "block": "[0-3].[0-5]"}


@functools.cache
def across(engine: str, kernels: str, groups: tuple[int, ...], unit: str) -> Across:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    with fake_mode():
        model = nn.Sequential(*(nn.Sequential(*(block() for _ in range(6))) for _ in range(4)))
        x = torch.empty(4, WIDTH)
    network = Network.load(Path(__file__).with_name("h200-ib.json"))
    knobs: Any = {"engines": (engine,), "kernels": kernels, "groups": groups, "units": (UNITS[unit],)}
    return scale_across(model, x, network=network, gpus=(GPUS,), batch_size=ROWS, **knobs)


def objective(trial: Any) -> float:
    """Milliseconds of a step; infinite where a GPU's memory is too small."""
    pick = trial.suggest_categorical
    engine, plan = pick("engine", ("ddp", "fsdp2", "hsdp")), pick("plan", ("bf16", "torch", "all"))
    ddp, fp8 = engine == "ddp", plan != "bf16"
    groups = (pick("group", (8, 64)),) if engine == "hsdp" else ()
    unit = "stage" if ddp else pick("unit", tuple(UNITS))
    gather = "-" if ddp else pick("gather", ("bf16", "fp8")) if fp8 else "bf16"
    gradients = pick("gradients", ("bf16", "int8")) if fp8 else "bf16"
    found = across(engine, plan if fp8 else "all", groups, unit)
    if any(sum(parts.values()) > found.capacity for parts in found.memory.values()):
        return float("inf")
    (row,) = (row for row in found.rows if (row.gather, row.gradients) == (gather, gradients))
    step = row.planned if fp8 else row.bf16
    trial.set_user_attr("ends", [step.low / 1e3, step.high / 1e3])
    return step.value / 1e3


if __name__ == "__main__":
    try:
        import optuna
    except ImportError:
        sys.exit("this search wants Optuna: pip install optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(objective, n_trials=40)
    best = study.best_trial
    print(f"trial {best.number}: {best.value:.1f} ms, {best.user_attrs['ends']}, {best.params}")
