"""What two ranks under FSDP2 are told, and what is looked at between their steps."""

from dataclasses import replace

import pytest
import torch
from ranks import on_ranks

from loka.core.exceptions import LokaError
from loka.data import Dealt, SyntheticClicks
from loka.distributed import shard_dense
from loka.train import TrainConfig, evaluate, newest_step, train
from loka.zoo import build

ROWS, HELD = 256, SyntheticClicks(rows=64, first_row=256, seed=0)
CONFIG = TrainConfig(batch_size=32, precision="fp32", log_every=2)


def model():
    torch.manual_seed(0)
    built = build("dlrm", dense_features=HELD.dense_features, vocab_sizes=HELD.vocab_sizes)
    return shard_dense(built, [], device="cpu", gather_in=None)


def job(rank, folder):
    rows = Dealt([SyntheticClicks(rows=ROWS, seed=0, shard=part, shards=2) for part in range(2)], rank=rank, ranks=2)
    seen, ours = [], model()

    def look(line):
        seen.append(evaluate(ours, HELD, batch_size=32)[0])

    done = train(ours, rows, config=CONFIG, on_log=look, checkpoints=folder / "looked")
    alone = train(model(), rows, config=CONFIG)
    other = {"lr": 1e-2, "grad_clip": 0.5, "gradients": "int8"} if rank else {"seed": 3}
    with pytest.raises(LokaError, match="different configurations") as caught:
        train(model(), rows, config=replace(CONFIG, **other))
    train(model(), rows, config=replace(CONFIG, seed=rank))
    return {
        "moved": float(abs(seen[0] - seen[-1]).max()),
        "saved": newest_step(folder / "looked"),
        "alike": done.train_ne == alone.train_ne,
        "why": caught.value.why,
    }


def test_evaluations_between_steps_and_other_configurations(tmp_path):
    for rank in on_ranks(job, 2, tmp_path):
        assert rank["saved"] == ROWS // 32 // 2
        assert rank["moved"] > 0
        assert rank["alike"]
        assert sorted(rank["why"]) == [
            "rank 1: grad_clip is 0.5, and None on rank 0",
            "rank 1: gradients is 'int8', and 'hp' on rank 0",
            "rank 1: lr is 0.01, and 0.001 on rank 0",
        ]
