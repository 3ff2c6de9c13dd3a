"""A search over plan and parallel knobs by Optuna (pip install optuna), each trial priced by `scale_across`,
as CubicML (arXiv 2409.04585) does by a learnt model. No GPU: steps are estimates, the network is assumed."""

import functools
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loka.core.records.across import Across
from loka.scaling.cluster import Network, scale_across
from loka.scaling.inputs import fake_mode

GPUS, ROWS, WIDTH = 1024, 8192, 4096
UNITS = {"stage": "[0-3]", "block": "[0-3].[0-5]"}


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


@functools.cache
def across(engine: Any, group: int, unit: str, kernels: Any) -> Across:
    with fake_mode():
        model = nn.Sequential(*(nn.Sequential(*(block() for _ in range(6))) for _ in range(4)))
        x = torch.empty(4, WIDTH)
    options: Any = {"groups": (group,)} if group else {}
    network = Network.load(Path(__file__).with_name("h200-ib.json"))
    return scale_across(
        model, x, network=network, gpus=(GPUS,), batch_size=ROWS, engines=(engine,), units=(UNITS[unit],),
        kernels=kernels, **options,
    )  # fmt: skip


def objective(trial: Any) -> float:
    """Milliseconds of a step; infinite where a GPU's memory is too small."""

    def pick(name: str, *values: Any, when: bool = True) -> Any:
        return trial.suggest_categorical(name, values) if when else values[0]

    engine = pick("engine", "ddp", "fsdp2", "hsdp")
    plan = pick("plan", "bf16", "torch", "all")
    group = pick("group", 8, 64) if engine == "hsdp" else 0
    unit = pick("unit", *UNITS, when=engine != "ddp")
    gather = pick("gather", "bf16", "fp8", when=engine != "ddp" and plan != "bf16")
    gradients = pick("gradients", "bf16", "int8", when=plan != "bf16")
    found = across(engine, group, unit, "all" if plan == "bf16" else plan)
    if any(sum(parts.values()) > found.capacity for parts in found.memory.values()):
        return float("inf")
    wire = ("-" if engine == "ddp" else gather, gradients)
    (row,) = (row for row in found.rows if (row.gather, row.gradients) == wire)
    step = row.bf16 if plan == "bf16" else row.planned
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
