"""Runs beside TorchRec's tables: what goes wrong in them, what comes before and after them."""

from dataclasses import replace

import command_line
import pytest
import torch
from ranks import on_ranks
from test_train_fsdp2 import BATCH, ROWS, built
from test_train_torchrec import CONFIG, by_tables

from loka.cli.inputs import open_data
from loka.cli.torchrun import process_group
from loka.core.exceptions import DataRefused, LokaError
from loka.distributed import with_embedding_bags
from loka.distributed.tables.sharded_tables import sharded_states
from loka.nn import unwrap
from loka.train import evaluate, train
from loka.train.checkpointing.state import capture
from loka.train.optim import build_optimizers
from loka.train.running import RunningTasks
from loka.zoo import build

pytest.importorskip("torchrec")
pytest.importorskip("fbgemm_gpu")


@pytest.fixture
def rows():
    return open_data(None, rows=ROWS, seed=0)


class Corrupt:
    def __init__(self, inner, at):
        self.inner, self.at = inner, at

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def batches(self, size, start=0):
        for number, batch in enumerate(self.inner.batches(size, start=start), start):
            if number == self.at:
                raise DataRefused(f"batch {number} is corrupt", way_out="mend it")
            yield batch


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_batch_that_cannot_be_read_ends_the_run_by_its_error(rows, at):
    """Where the pipeline met it as it filled, the run ended as if it were complete, with the model inside."""
    with process_group("cpu", of_one=True):
        model = by_tables(build("dlrm", dense_features=13, vocab_sizes=rows.train.vocab_sizes))
        with pytest.raises(DataRefused, match=f"batch {at} is corrupt"):
            train(model, Corrupt(rows.train, at), config=CONFIG)
        evaluate(model, rows.test, batch_size=BATCH)


def test_a_second_run_begins_with_new_sums(rows):
    """As that of any new optimizer; they carried over."""
    with process_group("cpu", of_one=True):
        model = by_tables(build("dlrm", dense_features=13, vocab_sizes=rows.train.vocab_sizes))
        train(model, rows.train, config=CONFIG)
        assert any(shard.tensor.any() for state in sharded_states(model).values() for shard in state.local_shards())
        build_optimizers(model, CONFIG)
        assert not any(shard.tensor.any() for state in sharded_states(model).values() for shard in state.local_shards())


def test_a_look_at_the_model_under_the_pipeline_says_how(rows):
    with process_group("cpu", of_one=True):
        model = by_tables(build("dlrm", dense_features=13, vocab_sizes=rows.train.vocab_sizes))

        def look(line):
            evaluate(model, rows.test, batch_size=BATCH)

        with pytest.raises(LokaError, match="ids of the next batch on their way") as caught:
            train(model, rows.train, config=CONFIG, on_log=look)
        assert "run.close()" in caught.value.way_out
        train(model, rows.train, config=replace(CONFIG, pipeline=False), on_log=look)


@pytest.mark.slow
def test_a_model_that_its_owner_compiled_trains_and_stays_so(rows, monkeypatch):
    """Dynamo failed in TorchRec's lookups; and compiled steps left the model as written."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: real(function, backend="eager"))
    found = []
    with process_group("cpu", of_one=True):
        for compiled, step in ((False, "eager"), (True, "eager"), (True, "compile")):
            torch.manual_seed(0)
            model = by_tables(build("dlrm", dense_features=13, vocab_sizes=rows.train.vocab_sizes))
            own = unwrap(model)
            if compiled:
                own.compile(backend="eager")
            call = own._compiled_call_impl
            done = train(model, rows.train, config=replace(CONFIG, step=step))
            assert own._compiled_call_impl is call
            assert done.step_reason is None
            found.append(done.train_ne)
    assert found == [pytest.approx(found[0], rel=1e-5)] * 3


def test_tables_with_an_optimizer_of_their_own_are_refused():
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    model = with_embedding_bags(build("dlrm", dense_features=4, vocab_sizes=(8, 8)))
    bags = model.front.embeddings.bags
    apply_optimizer_in_backward(torch.optim.SGD, [bags.embedding_bags.t1.weight], {"lr": 0.1})
    with process_group("cpu", of_one=True), pytest.raises(LokaError, match="optimizer in their backward") as caught:
        by_tables(model)
    assert caught.value.why == ("front.embeddings.bags.embedding_bags.t1.weight: SGD",)


def placed(rank, folder):
    rows = open_data(None, rows=ROWS, seed=0, part=(rank, 2)).train
    model = by_tables(built("dcnv2"))
    evaluate(model, rows, batch_size=BATCH)
    there = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    state = capture(model, {}, RunningTasks(("",), torch.device("cpu"), window=8))
    kept = {name.rpartition(".")[2] for name in state["buffers"]}
    train(model, rows, config=CONFIG, checkpoints=folder / "placed")
    return {"left out": "_features_order_tensor" in there - kept}


@pytest.mark.slow
def test_how_features_lie_in_shards_is_no_state(tmp_path):
    """It is of one placement: put into another, ids went to the wrong tables, and a bare model has no place for it."""
    assert on_ranks(placed, 2, tmp_path) == [{"left out": True}] * 2
    common = ("--model", "dcnv2", "--rows", ROWS, "--batch-size", 32, "--device", "cpu")
    text = command_line.loka("probe", *common, "--checkpoint", "placed", cwd=tmp_path)
    assert "after" in text
    assert "only names and shapes were compared" in text, "modules of its own stand there for the zoo's"
