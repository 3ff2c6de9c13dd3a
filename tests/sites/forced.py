import functools
from dataclasses import dataclass

import pytest
from foreign.registry import FOREIGN
from foreign.spec import Foreign, train_step
from models import forced_plan
from oracle import ROW

import loka
from loka.core.records.report import HP
from loka.measurement.settings import Settings

OTHERS_WARN = [pytest.mark.filterwarnings(f"ignore::{kind}Warning") for kind in ("Future", "User", "Deprecation")]
QUICK = Settings(rows=32, min_draws=2, max_draws=2)


@dataclass(frozen=True)
class Planned:
    foreign: Foreign
    stats: loka.Stats
    plan: loka.Plan

    def converted(self):
        return loka.convert(self.foreign.build(), self.plan)

    @property
    def fp8(self):
        return {name for name, decision in self.plan.decisions.items() if decision.candidate != HP}


def probe(model, step):
    """What one sampled step shows, without effects, which no forced plan needs."""
    with loka.Probe(model, every=1, effect_samples=0) as probing:
        step()
    return probing.stats()


def force(stats, candidate=ROW, **others):
    return forced_plan(stats, candidate, *sorted({*others.values()} - {HP, candidate}), force=others)


@functools.cache
def planned(name):
    foreign = FOREIGN[name]
    foreign.skip_without_libraries()
    model = foreign.build()
    stats = probe(model, lambda: train_step(foreign, model))
    return Planned(foreign, stats, force(stats))


def plan_of(model, *inputs, candidate=ROW):
    """Of a model that returns one tensor; it is left with gradients."""
    return force(probe(model, lambda: model(*inputs).square().mean().backward()), candidate)


def runs(model):
    return {name: int(counts["runs"]) for name, counts in loka.health_of(model).items()}


def ran(model, gemms=("output", "grad_input", "grad_weight")):
    wanted = tuple(gemms)
    return {name for name, count in runs(model).items() if count and name.rpartition("/")[2] in wanted}
