import re
import shutil
import sys
from dataclasses import replace

import command_line
import numpy as np
import pytest
import torch
import torch.distributed as dist
from models import forced_plan
from ranks import on_ranks
from test_train_fsdp2 import AUTO, BATCH, POW2, ROWS, STEPS, built, held_out, logged, make_plan
from torch import nn

import loka
from loka.cli.inputs import open_data
from loka.cli.torchrun import process_group
from loka.core.exceptions import LokaError
from loka.core.records.plan import Plan
from loka.distributed import EmbeddingBags, shard_tables, with_embedding_bags
from loka.train import TrainConfig, train
from loka.train.ahead import Ahead
from loka.train.checkpointing.sharded import read_tensors
from loka.train.run import Callback
from loka.train.steps import step as steps
from loka.zoo import HistoryTable, build

pytest.importorskip("torchrec")
pytest.importorskip("fbgemm_gpu")

SHARDED = ("--engine", "torchrec", "--batch-size", BATCH)
CONFIG = TrainConfig(batch_size=BATCH, precision="fp32", checkpoint_every=2, log_every=1)


def write_rows(folder):
    """800 rows in the layout of MLPerf's Criteo: 13 counts, 26 ids of columns from 3 to 128 ids wide."""
    rng = np.random.default_rng(0)
    rows = np.arange(ROWS)[:, None]
    np.save(folder / "day_0_dense.npy", rng.standard_exponential((ROWS, 13)).astype(np.float32))
    np.save(folder / "day_0_sparse.npy", (rows * np.arange(1, 27) % np.arange(3, 133, 5)).astype(np.int32))
    np.save(folder / "day_0_labels.npy", (rng.random((ROWS, 1)) < 0.3).astype(np.int32))


def on_two(rank, folder):
    planned = (*SHARDED, "--data", "criteo", "--plan", "plan.json")
    kept = (*planned, "--checkpoints", "kept", "--checkpoint-every", "2")
    found = {"pipeline": logged(folder, *kept), "one by one": logged(folder, *planned, "--no-pipeline")}
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder / "kept" / f"step-{STEPS:08d}")
    found["goes on"] = logged(folder, *kept)

    rows = open_data(None, rows=ROWS, seed=0, part=(rank, 2)).train
    watched = by_rows(built("dcnv2"))
    with loka.Probe(watched, every=1, effect_samples=0) as probe:
        train(watched, rows, config=replace(CONFIG, max_rows=2 * BATCH))
    if rank == 0:
        forced_plan(probe.stats(), POW2, budget=loka.Budget(min_sqnr_db=None)).save(folder / "cross.json")
    dist.barrier()
    plan = Plan.load(folder / "cross.json")
    done = train(by_rows(built("dcnv2")), rows, config=CONFIG, plan=plan, checkpoints=folder / "dcn")
    saved_again(folder, rank, 2)
    return {
        **found,
        "exchange": done.exchange,
        "looked up": [looks_up_alike(by_rows), looks_up_alike(by_tables)],
        "losses": losses_of(by_tables(built()), rows, CONFIG),
    }


def looks_up_alike(sharded):
    model, batch = built("dcnv2"), next(open_data(None, rows=ROWS, seed=0).test.batches(BATCH))
    with torch.no_grad():
        expected = model(batch.dense, batch.sparse)
        return torch.equal(sharded(model)(batch.dense, batch.sparse), expected)


def by_tables(model):
    return shard_tables(model, device="cpu", batch_size=BATCH, lr=CONFIG.sparse_lr)


def by_rows(model):
    """Every table cut in two, which TorchRec's planner does on GPUs alone."""
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingPlan

    bags = with_embedding_bags(model).get_submodule("front.embeddings.bags")
    where = {config.name: row_wise(compute_kernel="fused") for config in bags.embedding_bag_configs()}
    sides = {"local_size": 2, "world_size": 2, "device_type": "cpu"}
    plan = ShardingPlan({"front.embeddings.bags": construct_module_sharding_plan(bags, where, **sides)})
    return shard_tables(model, device="cpu", batch_size=BATCH, lr=0.1, placement=plan)


def saved_again(folder, rank, ranks):
    rows = open_data(None, rows=ROWS, seed=0, part=(rank, ranks), parts=2).train
    model = built("dcnv2")
    for weight in model.parameters():
        weight.data.add_(1.0)
    done = train(
        by_tables(model),
        rows,
        config=replace(CONFIG, batch_size=2 * BATCH // ranks),
        plan=Plan.load(folder / "cross.json"),
        checkpoints=folder / "dcn",
        callback=Saves(folder / f"again-{ranks}"),
    )
    assert done.resumed_from == done.steps == STEPS


class Saves(Callback):
    def __init__(self, folder):
        self.folder = folder

    def start(self, run):
        if run.step == run.steps:
            run.save(self.folder, beside={}, identity={})


def on_one(rank, folder):
    saved_again(folder, 0, 1)
    return {name: as_the_other(name) for name in ("dlrm", "dcnv2")}


def as_the_other(name):
    rows = open_data(None, rows=ROWS, seed=0, parts=2).train
    config = replace(CONFIG, batch_size=2 * BATCH)
    ours, theirs = built(name), built(name)
    expected = losses_of(ours, rows, config)
    torch.manual_seed(1)  # after `train`'s own seed TorchRec would draw the very tables that the zoo drew
    found = losses_of(by_tables(theirs), rows, config)
    whole = built(name)
    whole.load_state_dict(  # tables of features as the merged one
        {n: w.local_shards()[0].tensor if "bags" in n else w for n, w in theirs.state_dict().items()}
    )
    return {
        "expected": expected,
        "losses": max(abs(a - b) for a, b in zip(expected, found, strict=True)),
        "weights": max(
            float((a - b).detach().abs().max()) for a, b in zip(ours.parameters(), whole.parameters(), strict=True)
        ),
    }


def losses_of(model, rows, config):
    """The mean loss of this rank's rows so far, after each step."""
    seen = []
    train(model, rows, config=config, on_log=lambda line: seen.append(line.reading.lifetime.logloss))
    return seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("torchrec")


@pytest.fixture(scope="module")
def two(folder):
    (folder / "criteo").mkdir()
    write_rows(folder / "criteo")
    make_plan(folder)
    return on_ranks(on_two, 2, folder)


@pytest.fixture(scope="module")
def one(two, folder):
    return on_ranks(on_one, 1, folder)[0]


def test_rows_of_a_folder_by_a_plan_of_the_bare_model(two):
    """The pipeline moves no bit: ids travel ahead, rows are looked up when they are needed."""
    for rank in two:
        assert len(rank["pipeline"]["losses"]) == STEPS
        assert rank["pipeline"]["losses"] == rank["one by one"]["losses"]
    said = two[0]["pipeline"]["said"]
    assert steps._PIPELINE in said
    assert f"ran {STEPS} x top.3/grad_weight" in said
    assert "TorchRec, a batch at a time" in two[0]["one by one"]["said"]


def test_it_goes_on_to_the_same_bits(two):
    for rank in two:
        assert rank["goes on"]["losses"] == rank["pipeline"]["losses"][4:]
    first = two[0]
    assert "continued from step 4" in first["goes on"]["said"]
    assert held_out(first["goes on"]["said"]) == held_out(first["pipeline"]["said"])


def test_a_plan_from_within_fits_the_bare_model(two, folder):
    assert two[0]["exchange"] == steps._PIPELINE
    plan = Plan.load(folder / "cross.json")
    assert len(plan.decisions) > 20
    loka.convert(built("dcnv2"), plan)


def test_state_comes_back_bit_for_bit_on_two_ranks_and_on_one(two, one, folder):
    there = read_all(folder / "dcn")
    momenta = [name for name in there if name.endswith("/momentum1")]
    assert len(momenta) == len([name for name in there if re.match("model/.*bags", name)]) == 26
    assert all(there[name].count_nonzero() for name in momenta)
    for ranks in (1, 2):
        again = read_all(folder / f"again-{ranks}")
        assert again.keys() == there.keys()
        assert all(torch.equal(again[name], value) for name, value in there.items())


def read_all(path):
    into = {}

    def wanted(there):
        into.update({n: torch.zeros(found.size, dtype=found.properties.dtype) for n, found in there.items()})
        return into

    read_tensors(path / f"step-{STEPS:08d}", wanted)
    return into


@pytest.mark.parametrize("name", ["dlrm", "dcnv2"])
def test_one_rank_trains_what_the_other_engine_does(one, name):
    """The same float32 numbers but for the order of sums. A weight below 2 is rounded by 2^-24 in each of the
    five steps, and its gradients, of sums in another order, by some of these; a loss near 0.7 by 2^-25."""
    assert one[name]["weights"] < 2 * STEPS * 2**-23
    assert one[name]["losses"] < 2**-24


def test_two_ranks_train_what_one_process_does(two, one):
    """Tables are looked up where they lie, to the bit; gradients are the mean over the ranks."""
    assert all(all(rank["looked up"]) for rank in two)
    means = [sum(both) / 2 for both in zip(*(rank["losses"] for rank in two), strict=True)]
    assert means == pytest.approx(one["dlrm"]["expected"], abs=2**-24, rel=0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((*SHARDED, "--qcomm", "fp8"), "TorchRec: RuntimeError: fp8 is not supported by CPU"),
        ((*SHARDED, "--accumulate", 2), "leave --accumulate out"),
        ((*SHARDED, "--average", "ema"), "leave --average out"),
        ((*SHARDED, "--dense", "fsdp2"), "leave --dense out to shard tables"),
        ((*SHARDED, "--model", "dcnv2:bars"), "multiples of 4"),
        (("--batch-size", BATCH, "--qcomm", "fp16"), "add --engine torchrec"),
        (("--batch-size", BATCH, "--engine", "torchrun"), "one of torch, torchrec"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, options, said):
    assert said in logged(tmp_path, *options, fails=True)["said"]
    assert not dist.is_initialized()


def test_without_torchrec_it_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchrec", None)
    said = logged(tmp_path, *SHARDED, fails=True)["said"]
    assert "install torchrec and fbgemm-gpu built for this torch" in said
    assert "--engine torch" in said


def test_what_has_no_bags_is_refused():
    history = build("hstu", dense_features=4, vocab_sizes=(8, 8), history=HistoryTable(column=0))
    with pytest.raises(LokaError, match="sequences of rows and no bags"):
        with_embedding_bags(history)
    with pytest.raises(LokaError, match="neither the zoo's `front` nor an EmbeddingBagCollection"):
        with_embedding_bags(nn.Linear(2, 1))


def test_frozen_tables_are_refused():
    """They learned: fbgemm's backward does not ask who wants a gradient."""
    model = build("dlrm", dense_features=4, vocab_sizes=(8, 8))
    model.front.embeddings.requires_grad_(False)
    with process_group("cpu", of_one=True), pytest.raises(LokaError, match="tables are frozen") as caught:
        shard_tables(model, device="cpu", batch_size=8, lr=0.1)
    assert caught.value.why == tuple(f"front.embeddings.bags.embedding_bags.t{table}.weight" for table in range(2))


def test_where_tables_may_lie():
    """By columns AdaGrad would take its mean over a part of a row; dense kernels leave rows untrained."""
    from torchrec.distributed import sharding_plan
    from torchrec.distributed.types import ShardingPlan

    path = "front.embeddings.bags"
    model = with_embedding_bags(build("dlrm", dense_features=4, vocab_sizes=(8, 8)))
    where = {"t0": sharding_plan.column_wise(ranks=[0]), "t1": sharding_plan.table_wise(rank=0)}
    sides = {"local_size": 1, "world_size": 1, "device_type": "cpu"}
    wrong = sharding_plan.construct_module_sharding_plan(model.get_submodule(path), where, **sides)
    with process_group("cpu", of_one=True), pytest.raises(LokaError) as caught:
        shard_tables(model, device="cpu", batch_size=8, lr=0.1, placement=ShardingPlan({path: wrong}))
    assert caught.value.why == (f"{path}.t0: column_wise, dense", f"{path}.t1: table_wise, dense")
    large = build("dlrm", dense_features=4, vocab_sizes=(8, 8))
    large.front.embeddings = EmbeddingBags([torch.empty(10**12, 16, device="meta"), torch.zeros(8, 16)])
    with process_group("cpu", of_one=True), pytest.raises(LokaError, match="finds no place for the tables"):
        shard_tables(large, device="cpu", batch_size=8, lr=0.1)


def test_the_pipeline_may_trace_through_compiled_functions(monkeypatch):
    """torch 2.11 refuses them by default, and ids traveled a batch at a time there; torch 2.13 never does."""
    from torchrec.distributed import TrainPipelineSparseDist as Pipeline

    refused, fill = [], Pipeline.fill_pipeline

    def noted(*given):
        refused.append(torch._dynamo.config.error_on_nested_fx_trace)
        return fill(*given)

    monkeypatch.setattr(Pipeline, "fill_pipeline", noted)
    rows = open_data(None, rows=ROWS, seed=0).train
    model = build("dlrm", dense_features=13, vocab_sizes=rows.vocab_sizes)
    with process_group("cpu", of_one=True):
        train(shard_tables(model, device="cpu", batch_size=BATCH, lr=0.1), rows, config=CONFIG)
    assert refused[0] is False
    assert torch._dynamo.config.error_on_nested_fx_trace


def test_a_second_pipeline_reads_what_the_first_took():
    rows = list(open_data(None, rows=ROWS, seed=0).train.batches(BATCH))
    coming, device = Ahead(iter(rows)), torch.device("cpu")
    seen = [next(coming)]
    first = coming.early(device)
    taken = [next(first), next(first)]
    seen.append(next(coming))
    second = coming.early(device)
    again = [next(second), next(second)]
    assert [len(taken), again[0] is taken[1]] == [2, True]
    seen += coming
    assert [batch.sparse.sum() for batch in seen] == [batch.sparse.sum() for batch in rows]


def test_one_process_probes_the_model_of_sharded_tables(two, folder):
    common = ("--model", "dcnv2", "--rows", ROWS, "--batch-size", 32, "--device", "cpu")
    said = command_line.loka("probe", *common, "--checkpoint", "dcn", cwd=folder)
    assert f"step-{STEPS:08d}, after {STEPS} steps" in said


def joined(rank, folder):
    seen = Regions()
    plan, config = Plan.load(folder / "plan.json"), replace(CONFIG, step="compile")
    rows = open_data(None, rows=ROWS, seed=0, part=(rank, 2)).train
    done = train(by_tables(built()), rows, config=config, plan=plan, callback=seen)
    return {
        "exchange": done.exchange,
        "reason": done.step_reason,
        "joined": seen.joined,
        "auto": logged(folder, *SHARDED, *AUTO, "--min-sqnr-db", 0, "--out", "auto"),
        "alone": logged(folder, *SHARDED, *AUTO, "--min-sqnr-db", 0, "--out", "alone", "--no-pipeline"),
        "untraced": logged(folder, *SHARDED, "--model", "hstu"),
    }


class Regions(Callback):
    def after(self, run):
        self.joined = {site for region in loka.regions(run.model).applied for site in region}


@pytest.mark.slow
def test_regions_and_auto_in_the_pipeline(tmp_path):
    """Auto calls the model between steps, so a pipeline ends there and another begins; no bit moves."""
    make_plan(tmp_path)
    for rank in on_ranks(joined, 2, tmp_path):
        assert rank["exchange"] == steps._PIPELINE
        assert rank["reason"] is None
        assert rank["joined"] >= {"top.3", "top.6"}
        assert len(rank["auto"]["losses"]) == STEPS
        assert rank["auto"]["losses"] == rank["alone"]["losses"]
        assert len(rank["untraced"]["losses"]) == STEPS
