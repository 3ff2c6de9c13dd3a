"""Tables with sparse gradients beside a collection that TorchRec shards."""

import shutil
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from test_train_fsdp2 import BATCH, ROWS, STEPS, built
from test_train_torchrec import CONFIG
from torch import nn

from loka.cli.inputs import open_data
from loka.cli.torchrun import process_group
from loka.core.exceptions import CheckpointRefused
from loka.distributed import shard_tables
from loka.distributed.tables.sharded_tables import sharded_states, sharded_weights
from loka.nn import unwrap
from loka.train import run, train
from loka.train.checkpointing.resharding import own_state
from loka.train.run import Callback

torchrec = pytest.importorskip("torchrec")
pytest.importorskip("fbgemm_gpu")

SCHEDULED = replace(CONFIG, schedule="linear", warmup=0.4)


class Collected(nn.Module):
    """The first column in a collection, the second in a table of its own."""

    def __init__(self, rows):
        super().__init__()
        first, second, *_ = rows.vocab_sizes
        table = torchrec.EmbeddingBagConfig(name="t0", embedding_dim=8, num_embeddings=first, feature_names=["f0"])
        self.bags = torchrec.EmbeddingBagCollection(tables=[table], device=torch.device("cpu"))
        self.own = nn.Embedding(second, 8, sparse=True)
        self.top = nn.Sequential(nn.Linear(rows.dense_features + 16, 32), nn.ReLU(), nn.Linear(32, 1))

    def first(self, ids):
        once = torch.ones(len(ids), dtype=torch.int64)
        return self.bags(torchrec.KeyedJaggedTensor(keys=["f0"], values=ids.contiguous(), lengths=once))["f0"]

    def forward(self, dense, ids):
        return self.top(torch.cat([dense, self.first(ids[:, 0]), self.own(ids[:, 1])], 1)).squeeze(1)


class Plain(Collected):
    """The same, without TorchRec."""

    def __init__(self, rows):
        super().__init__(rows)
        weight = self.bags.embedding_bags.t0.weight.detach()
        self.bags = nn.Embedding.from_pretrained(weight, freeze=False, sparse=True)

    def first(self, ids):
        return self.bags(ids)


def rows_of(rank, ranks):
    return open_data(None, rows=ROWS, seed=0, part=(rank, ranks), parts=2).train


def seeded(kind, rows):
    torch.manual_seed(0)
    return kind(rows)


def by_torchrec(rows):
    return shard_tables(seeded(Collected, rows), device="cpu", batch_size=BATCH, lr=CONFIG.sparse_lr)


class Rates(Callback):
    def __init__(self):
        self.seen = []

    def after(self, run):
        self.seen.append([run.optimizers[kind].param_groups[0]["lr"] for kind in ("sparse", "fused")])

    def start(self, run):
        self.run = run


def trained(rank, ranks, **options):
    """Of this rank: its weights and AdaGrad's sums, as lists of bits, and rates after each step."""
    rows, rates = rows_of(rank, ranks), Rates()
    model = by_torchrec(rows)
    train(model, rows, config=replace(SCHEDULED, batch_size=2 * BATCH // ranks), callback=rates, **options)
    own = unwrap(model).own.weight
    found = {name: weight.tolist() for name, weight in model.named_parameters() if "bags" not in name}
    for name, table in {**sharded_weights(model), **sharded_states(model)}.items():
        found[name] = [shard.tensor.tolist() for shard in table.local_shards()]
    found["sums"] = rates.run.optimizers["sparse"].state[own]["sum"].tolist()
    return {"state": found, "own": own.tolist(), "rates": rates.seen}


def resumed(rank, ranks, folder):
    kept = folder / f"kept-{ranks}"
    found = {"trained": trained(rank, ranks, checkpoints=kept)}
    if ranks > 1:
        dist.barrier()
    if rank == 0:
        shutil.rmtree(kept / f"step-{STEPS:08d}")
    if ranks > 1:
        dist.barrier()
    return {**found, "goes on": trained(rank, ranks, checkpoints=kept)}


def on_two(rank, folder):
    return resumed(rank, 2, folder)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    with process_group("cpu", of_one=True):
        return resumed(0, 1, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return on_ranks(on_two, 2, tmp_path_factory.mktemp("two"))


def plain():
    rows = rows_of(0, 1)
    model = seeded(Plain, rows)
    before = model.own.weight.detach().clone()
    train(model, rows, config=replace(SCHEDULED, batch_size=2 * BATCH))
    return before, model.own.weight.detach()


def test_they_train_as_without_torchrec(one, two):
    """They were in no optimizer: FusedTables stood in the place of theirs. Sums come in another order, so each of
    the steps may round a weight below 2 otherwise, and its gradient: as in test_train_torchrec."""
    before, expected = plain()
    assert (expected - before).abs().max() > 0.1
    for found in (one, *two):
        own = torch.tensor(found["trained"]["own"])
        torch.testing.assert_close(own, expected, rtol=0, atol=2 * STEPS * 2**-23)
    assert two[0]["trained"]["own"] == two[1]["trained"]["own"]


def test_their_gradients_do_not_add_up():
    with process_group("cpu", of_one=True):
        rows = rows_of(0, 1)
        model = by_torchrec(rows)
        train(model, rows, config=replace(SCHEDULED, batch_size=2 * BATCH))
    assert unwrap(model).own.weight.grad._nnz() <= 2 * BATCH


def test_both_rates_follow_the_schedule(one):
    for sparse, fused in one["trained"]["rates"]:
        assert sparse == fused
    assert len({fused for _, fused in one["trained"]["rates"]}) == STEPS


def test_both_go_on_to_the_same_bits(one, two):
    for found in (one, *two):
        assert len(found["goes on"]["rates"]) == 1
        assert found["goes on"]["state"] == found["trained"]["state"]


def without_the_name(*what):
    """As it was saved until 2026-11-28."""
    found = own_state(*what)
    found["groups"]["sparse"] = found["groups"].pop("fused")
    return found


@pytest.mark.slow
def test_checkpoints_of_before_are_gone_on_from(tmp_path, monkeypatch):
    rows = rows_of(0, 1)

    def sharded(model):
        return shard_tables(model, device="cpu", batch_size=BATCH, lr=CONFIG.sparse_lr)

    with process_group("cpu", of_one=True):
        expected = sharded(built("dlrm"))
        with monkeypatch.context() as before:
            before.setattr(run, "own_state", without_the_name)
            train(expected, rows, config=SCHEDULED, checkpoints=tmp_path / "zoo")
            train(by_torchrec(rows), rows, config=SCHEDULED, checkpoints=tmp_path / "beside")
        found = sharded(built("dlrm"))
        shutil.rmtree(newest(tmp_path / "zoo"))
        train(found, rows, config=SCHEDULED, checkpoints=tmp_path / "zoo")
        for there, here in zip(expected.parameters(), found.parameters(), strict=True):
            assert torch.equal(there, here)
        with pytest.raises(
            CheckpointRefused, match="does not fit this model"
        ) as refused:  # its own table was not trained
            train(by_torchrec(rows), rows, config=SCHEDULED, checkpoints=tmp_path / "beside")
        assert "--mods" in refused.value.way_out


def newest(folder):
    return max(folder.glob("step-*"))
