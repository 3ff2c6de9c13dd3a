"""DistributedDataParallel on two ranks, wrapped before or after `convert`, eager and split by torch.compile.

As under FSDP2 (test_ranks_fsdp2.py), one process that takes both halves of the rows in turn does the same
sums.
"""

from dataclasses import dataclass

import pytest
import torch
from rank_models import STEPS, Mixed, adamw, bare_plan, by_halves, left, mixed, on_rank, planned, runs, sgd
from ranks import on_ranks
from torch._dynamo.backends.registry import lookup_backend
from torch.nn.parallel import DistributedDataParallel

import loka
from loka.core.records.plan import Plan

ORDERS = ("convert first", "wrap first")
OPTIONS = {"plain": {}, "static graph": {"static_graph": True}, "unused": {"find_unused_parameters": True}}
ROUNDING = 8 * 0.7 * 2**-24  # of float32, in losses near 0.7


class Skipping(Mixed):
    """Leaves its experts out, so that their parameters are unused."""

    def forward(self, x):
        x = self.cross(torch.relu(self.bottom(x)).mean(1))
        return self.top(x + self.gated(x)).sum(-1)


@dataclass(frozen=True)
class Job:
    plan: Plan

    def __call__(self, rank, folder):
        found = {
            f"{order}, {name}, {make.__name__}": self.trained(rank, order, make, **options)
            for order in ORDERS
            for name, options in OPTIONS.items()
            for make in (sgd, adamw)
        }
        skipping = mixed()
        skipping.__class__ = Skipping
        found["skipping"] = self.trained(rank, "wrap first", sgd, model=skipping, find_unused_parameters=True)
        return found

    def trained(self, rank, order, make, *, model=None, backend=None, **options):
        model = model or mixed()
        if order == "convert first":
            wrapped = DistributedDataParallel(loka.convert(model, self.plan), **options)
        else:
            wrapped = loka.convert(DistributedDataParallel(model, **options), self.plan)
        called = wrapped if backend is None else torch.compile(wrapped, backend=backend)
        losses = on_rank(called, model.parameters(), rank, make)
        found = {"losses": losses, "runs": runs(wrapped), "keys": list(wrapped.state_dict())}
        loka.revert(wrapped)
        return {**found, "left": left(wrapped)}


@dataclass(frozen=True)
class Compiled(Job):
    """Buckets of 4 KB, as large as a weight here: DDPOptimizer splits the graph at each."""

    def __call__(self, rank, folder):
        torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 4096
        found = {}
        for order in ORDERS:
            parts = []

            def backend(graph, inputs, parts=parts):
                parts.append(len(graph.graph.nodes))
                return lookup_backend("aot_eager")(graph, inputs)

            torch._dynamo.reset()
            case = f"{order}, plain, sgd"
            found[case] = self.trained(rank, order, sgd, backend=backend, bucket_cap_mb=4096 / 2**20)
            found[case]["parts"] = len(parts)
        return found


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    return on_ranks(Job(bare_plan()), 2, tmp_path_factory.mktemp("eager"))


def check(rank, found, make):
    expected = [losses[rank] for losses in by_halves(bare_plan(), make)]
    assert found["losses"] == pytest.approx(expected, abs=ROUNDING, rel=0)
    assert found["runs"] == dict.fromkeys(found["runs"], STEPS)
    assert set(found["runs"]) == planned(bare_plan())
    assert found["keys"] == [f"module.{key}" for key in mixed().state_dict()]
    assert not found["left"]


@pytest.mark.parametrize("make", [sgd, adamw], ids=["sgd", "adamw"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("order", ORDERS)
def test_two_ranks_train_as_one_process(eager, order, options, make):
    for rank in range(2):
        check(rank, eager[rank][f"{order}, {options}, {make.__name__}"], make)


def test_sites_that_a_step_leaves_out(eager):
    for rank in range(2):
        found = eager[rank]["skipping"]
        out = {site for site, count in found["runs"].items() if not count}
        assert {site.split("/")[0] for site in out} == {
            *("attention.in_proj_weight", "attention.out_proj", "experts.w[0]", "experts.w[1]")
        }
        assert {count for site, count in found["runs"].items() if site not in out} == {STEPS}


@pytest.mark.slow  # tests/compiler/test_joined_ddp.py compiles under DDP in every run
def test_compiled_in_parts(tmp_path):
    for rank, found in enumerate(on_ranks(Compiled(bare_plan()), 2, tmp_path)):
        for one in found.values():
            check(rank, one, sgd)
            assert one["parts"] > 3
