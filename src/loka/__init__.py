"""LoKA: FP8 where it is safe and fast, for recommendation models in PyTorch.

    loka.mods.apply(model, [loka.mods.NoBias(), loka.mods.BlockNorm(256), loka.mods.HardSwish()])
    with loka.Probe(model, every=100) as probe:
        for batch in loader:
            train_step(model, batch)
    report = loka.measure(probe.stats())
    plan = loka.plan(report, loka.Budget())
    loka.convert(model, plan)
    step = torch.compile(model)
    print(plan)

Importing it needs torch and numpy; optional libraries are imported by what uses them.
"""

from loka import mods, nn, serve
from loka.compiler.listing import regions
from loka.core.budget import Budget
from loka.core.exceptions import LokaError
from loka.core.records.plan import Plan
from loka.core.records.report import Report
from loka.core.records.stats import Stats
from loka.kernels.gemm.run import kernel_runs
from loka.measurement import measure
from loka.nn import check_finite, health_of
from loka.planner import agree, confirm, convert, diff, plan, revert
from loka.probe import Probe
from loka.scaling.scale import scale

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "LokaError",
    "Plan",
    "Probe",
    "Report",
    "Stats",
    "agree",
    "check_finite",
    "confirm",
    "convert",
    "diff",
    "health_of",
    "kernel_runs",
    "measure",
    "mods",
    "nn",
    "plan",
    "regions",
    "revert",
    "scale",
    "serve",
]
