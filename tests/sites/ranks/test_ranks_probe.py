import pytest
import torch
from rank_models import (
    BATCH,
    SITES,
    STEPS,
    bare_plan,
    bare_stats,
    by_halves,
    half,
    left,
    loss_of,
    mixed,
    on_rank,
    planned,
    probed,
    runs,
    sgd,
)
from ranks import on_ranks
from test_ranks_fsdp2 import ROUNDING, shard
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import loka
from loka.probe.merging import gather_stats

pytestmark = [pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"), pytest.mark.slow]
SHARDED = "sharded weights (FSDP) come and go with each backward"
THREE = {f"attention.in_proj_weight.chunk(3)[{part}]" for part in range(3)}


def told(stats):
    return {
        "names": set(stats.layers),
        "signature": stats.model,
        "skipped": dict(stats.skipped),
        "reasons": {layer.no_effect for layer in stats.layers.values()},
        "effects": all(layer.effects for layer in stats.layers.values()),
        "flops": stats.coverage.total,
        "seen": stats.coverage.seen,
        "rest": [rest.where for rest in stats.coverage.uncovered],
        "rows": {path: layer.operands["input"].numbers["count"] for path, layer in stats.layers.items()},
    }


def fsdp1(model, **options):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def checkpointed(model, how):
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=lambda inner: checkpoint_wrapper(inner, checkpoint_impl=how),
        check_fn=lambda inner: inner in (model.attention, model.cross, model.gated, model.top),
    )
    return model


WRAPPERS = {
    "ddp": DistributedDataParallel,
    "fsdp2, root": lambda model: shard(model, "root"),
    "fsdp2, layer": lambda model: shard(model, "layer"),
    "fsdp1": lambda model: fsdp1(model, use_orig_params=True),
    "fsdp1, flat": fsdp1,
    "checkpoint": lambda model: checkpointed(model, CheckpointImpl.NO_REENTRANT),
    "reentrant": lambda model: checkpointed(model, CheckpointImpl.REENTRANT),
    "ddp of checkpoint": lambda model: DistributedDataParallel(checkpointed(model, CheckpointImpl.NO_REENTRANT)),
}


def one_rank(rank, folder):
    found = {}
    for name, wrap in WRAPPERS.items():
        model = wrap(mixed())
        stats = probed(model, lambda step, model=model: loss_of(model, *half(step, rank)))
        found[name] = told(stats)
        if name == "ddp":
            found["merged"] = told(gather_stats(stats))
    inner = mixed()
    outer = fsdp1(inner, use_orig_params=True)  # its weights are freed before the outermost hooks run
    with loka.Probe(inner, every=1, depth_rows=8) as probe:
        loss_of(outer, *half(0, rank)).backward()
    return {**found, "inside of fsdp1": told(probe.stats())}


class Training:
    def __init__(self, plan):
        self.plan = plan

    def __call__(self, rank, folder):
        found = {}
        for name, order in (("fsdp1", 0), ("fsdp1", 1), ("fsdp1, flat", 0), ("ddp of checkpoint", 0)):
            model = loka.convert(mixed(), self.plan) if order == 0 else mixed()
            model = WRAPPERS[name](model)
            model = loka.convert(model, self.plan) if order == 1 else model
            losses = on_rank(model, model.parameters(), rank, sgd)
            found[f"{name}, {order}"] = {"losses": losses, "runs": runs(model)}
            loka.revert(model)
            found[f"{name}, {order}"]["left"] = left(model)
        return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_ranks(one_rank, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("wrapper", sorted({*WRAPPERS} - {"fsdp2, layer", "fsdp1, flat"}))
def test_sites_and_their_names_are_the_bare_models(ranks, wrapper):
    """Their FLOPs too: half of them, as each rank has half of the rows."""
    bare = told(bare_stats())
    assert bare["names"] == SITES
    for rank in ranks:
        found = rank[wrapper]
        assert found["names"] == SITES
        assert found["signature"] == bare_stats().model
        assert not found["skipped"]
        assert found["seen"] == bare["seen"] == 1
        assert found["rest"] == ["attention"]
        if wrapper != "reentrant":  # its inputs carry no gradient, so torch computes none
            assert found["flops"] == bare["flops"] / 2


def test_layers_of_fsdp2_hand_attention_three_tensors(ranks):
    """So it multiplies by three chunks, with torch alone too; nothing else has another name."""
    for rank in ranks:
        found = rank["fsdp2, layer"]
        assert found["names"] == SITES - {"attention.in_proj_weight"} | THREE
        assert found["seen"] == 1
        assert found["flops"] == told(bare_stats())["flops"] / 2


def test_flat_parameters_of_fsdp1_are_named_as_no_site(ranks):
    """Without `use_orig_params` what a module multiplies by is no parameter; linear layers are sites."""
    for rank in ranks:
        found = rank["fsdp1, flat"]
        assert found["names"] == {"bottom", "top.0", "top.2"}
        assert {"attention", "cross", "gated", "experts"} <= set(found["rest"])


def test_effects_are_refused_where_weights_are_sharded(ranks):
    for rank in ranks:
        for name in ("fsdp2, root", "fsdp2, layer", "fsdp1", "fsdp1, flat"):
            assert rank[name]["reasons"] == {SHARDED}
            assert not rank[name]["effects"]
        for name in ("ddp", "checkpoint", "ddp of checkpoint", "inside of fsdp1"):
            assert rank[name]["reasons"] == {""}
            assert rank[name]["effects"]


def test_ranks_merge_site_by_site(ranks):
    first, second = (rank["merged"] for rank in ranks)
    assert first == second
    assert first["names"] == SITES
    assert first["effects"]
    assert first["rows"] == told(bare_stats())["rows"]
    assert first["rows"]["top.0"] == 2 * BATCH


def test_one_plan_for_what_is_wrapped_otherwise(tmp_path):
    """FSDP1 before and after `convert`, and activation checkpoints inside DDP, which recompute sites."""
    plan = bare_plan()
    for rank, found in enumerate(on_ranks(Training(plan), 2, tmp_path)):
        for name, one in found.items():
            expected = [losses[rank] for losses in by_halves(plan, sgd)]
            assert one["losses"] == pytest.approx(expected, abs=ROUNDING, rel=0), name
            assert set(one["runs"]) == planned(plan)
            twice = ("attention", "cross", "gated", "top") if "checkpoint" in name else ()
            for site, count in one["runs"].items():
                again = site.startswith(twice) and site.endswith("/output") if twice else False
                assert count == STEPS * (1 + again), (name, site)
            assert not one["left"]
