import importlib
import json
import shutil
import warnings
from dataclasses import dataclass, replace
from unittest import mock

import fp8_run
import pytest
import torch.distributed as dist
from fp8_run import AUTO, PROBED, digest, tower
from ranks import on_ranks
from small_run import RandomRows, stop_at
from torch.nn.parallel import DistributedDataParallel

from loka.core.exceptions import WrongResults
from loka.core.records.stats import Stats
from loka.nn import sites_of
from loka.statistics.effect_casts import CASTS
from loka.train import train
from loka.train.automatic.auto import Auto

runs = importlib.import_module("loka.train.run")
WORLD, STEPS = 2, 31
CONFIG = replace(fp8_run.CONFIG, checkpoint_every=6)


@dataclass(frozen=True)
class Shard(RandomRows):
    rows: int = 16 * STEPS


def run(rank, folder, *, auto=AUTO, track=None, **others):
    model = DistributedDataParallel(tower(seed=rank))
    callback = Auto(auto, folder=folder, track=track)
    others = {"config": CONFIG, "checkpoints": folder / "checkpoints", **others}
    result = train(model, Shard(seed=rank), callback=callback, **others)
    return model.module, callback, result


def told(rank, folder, **others):
    """What has to be alike on both ranks, and what of this one was alone its own."""
    model, auto, result = run(rank, folder, **others)
    layers = Stats.load(folder / "stats").layers
    alike = {
        "effects": {path: sorted(layer.effects) for path, layer in layers.items()},
        "unknown": {path: layer.no_effect for path, layer in layers.items() if layer.no_effect},
        "phases": [(event.phase, event.step) for event in auto.timeline.events],
        "plan": json.dumps(auto.plan.to_json()),
        "left": json.dumps(result.plan.to_json()),
        "fp8": [*sites_of(model)],
        "weights": digest(dict(model.named_parameters())),
    }
    return {"alike": alike, "ne": result.train_ne}


class Killed(Exception):
    pass


def resumed(rank, folder):
    """Both are killed just after they converted, before that was saved: they measure again."""

    with pytest.raises(Killed):
        run(rank, folder, on_step=stop_at(PROBED + 1, Killed))
    dist.barrier()
    if rank == 1:
        shutil.rmtree(folder / "checkpoints" / f"step-{PROBED + 1:08d}")
    dist.barrier()
    return told(rank, folder)


def refusal(rank, folder, **others):
    try:
        run(rank, folder, **others)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def breaking(items, description, total):
    yield from []
    raise Killed("the disk of rank 0 is full")


def failures(rank, folder):
    """What this rank says where another fails, or where they do not fit together."""
    short = replace(AUTO, every=1, least_steps=1, most_steps=2)
    brief = {"auto": short, "config": replace(CONFIG, max_rows=16 * 4), "checkpoints": None}
    found = {
        "measuring": refusal(rank, folder / "0", track=breaking, **brief),
        "length": refusal(rank, folder / "1", config=replace(CONFIG, max_rows=16 * (4 + rank))),
        "parts": refusal(rank, folder / "1", config=replace(CONFIG, max_rows=58 - 4 * rank, accumulate=4)),
    }
    real, converted = runs.convert, []

    def unable(error):
        def convert(model, plan):
            if rank == 1:
                raise error
            real(model, plan)
            converted.append(model)

        return convert

    runs.convert = unable(RuntimeError("out of luck"))
    found["converting"] = refusal(rank, folder / "2", **brief)
    found["left"] = [list(sites_of(model)) for model in converted]
    runs.convert = unable(WrongResults("a kernel is wrong here"))
    model, auto, result = run(rank, folder / "3", **brief)
    runs.convert = real
    found["bf16"] = (auto.phase, result.plan, sites_of(model), auto.timeline.events[-2].note)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        train(tower(), RandomRows(16, seed=rank), config=CONFIG)
        apart = [str(one.message) for one in warned]
        train(tower(), RandomRows(16), config=CONFIG)
    with mock.patch.object(runs.Run, "step_reason", "it errs" if rank == 1 else None):
        found["why"] = train(tower(), RandomRows(16), config=CONFIG).step_reason
    return {**found, "apart": apart, "as one": [str(one.message) for one in warned[len(apart) :]]}


def one_rank(rank, folder):
    return {"straight": told(rank, folder / "straight"), "resumed": resumed(rank, folder / "killed")}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_ranks(one_rank, WORLD, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    return on_ranks(failures, WORLD, tmp_path_factory.mktemp("failing"))


@pytest.mark.slow
def test_two_ranks_turn_to_fp8_as_one(ranks):
    first, second = (rank["straight"] for rank in ranks)
    assert first["alike"] == second["alike"]
    assert first["ne"] != second["ne"], "their rows differ"
    assert not first["alike"]["unknown"]
    assert all(effects == sorted(CASTS) for effects in first["alike"]["effects"].values())
    assert first["alike"]["phases"] == [("probe", 0), ("measure", PROBED), ("fp8", PROBED), ("end", STEPS)]


def test_all_say_why_a_step_of_one_is_not_as_asked(failing):
    assert [rank["why"] for rank in failing] == ["rank 1: it errs", "it errs"]


@pytest.mark.slow
def test_they_go_on_from_the_newest_step(ranks):
    for rank in ranks:
        assert rank["resumed"] == rank["straight"]


def test_a_rank_that_fails_stops_the_other(failing):
    first, second = failing
    assert first["measuring"] == "Killed: the disk of rank 0 is full"
    assert second["measuring"].startswith("RankFailed: ")
    assert "rank 0: Killed: the disk of rank 0 is full" in second["measuring"]
    assert second["converting"] == "RuntimeError: out of luck"
    assert (first["left"], second["left"]) == ([[]], [])  # what rank 0 had converted
    assert "rank 1: RuntimeError: out of luck" in first["converting"]


def test_where_one_cannot_run_the_plan_both_stay_in_bf16(failing):
    for rank in failing:
        *found, note = rank["bf16"]
        assert found == ["bf16", None, {}]
        assert note.startswith("stays in bf16: some ranks cannot run the plan\n  rank 1: a kernel is wrong here\n")


def test_what_does_not_train_as_one_is_said(failing):
    for rank in failing:
        assert "different numbers of steps" in rank["length"]
        assert "rank 1: 5 steps" in rank["length"]
        assert "rank 0: 4 steps, the last batches in [4, 4] parts" in rank["parts"]
        assert "rank 1: 4 steps, the last batches in [3, 3] parts" in rank["parts"]
        (warned,) = rank["apart"]
        assert "DistributedDataParallel" in warned
        assert not rank["as one"]
