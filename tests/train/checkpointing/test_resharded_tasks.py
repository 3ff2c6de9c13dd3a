import shutil
from dataclasses import replace

import torch.distributed as dist
from ranks import on_ranks
from test_tasks import CONFIG, TASKS, TwoLabels, fresh
from torch.nn.parallel import DistributedDataParallel

from loka.data import Dealt
from loka.train import train

ROWS = 64  # of a step, all ranks together


def trained(folder):
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    source = Dealt([TwoLabels(320, seed=part) for part in range(2)], rank=rank, ranks=ranks)
    model = fresh()
    model.table.sparse = False
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    config = replace(CONFIG, batch_size=ROWS // ranks, checkpoint_every=4)
    result = train(wrapped, source, config=config, checkpoints=folder)
    readings = {name: reading.lifetime for name, reading in result.reading_by_task.items()}
    return {
        "tasks": source.tasks,
        "rows": {name: reading.rows for name, reading in readings.items()},
        "rates": {name: reading.base_rate for name, reading in readings.items()},
    }


def on_rank(rank, folder):
    return trained(folder / "run")


def test_counts_of_each_task_are_those_of_all_ranks(tmp_path):
    ranks = on_ranks(on_rank, 2, tmp_path)
    steps = sorted((tmp_path / "run").glob("step-*"))
    assert [step.name for step in steps[-2:]] == ["step-00000008", "step-00000010"]
    shutil.rmtree(steps[-1])
    alone = trained(tmp_path / "run")
    for found in (*ranks, alone):
        assert found["tasks"] == TASKS
    for name in TASKS:
        assert alone["rows"][name] == sum(found["rows"][name] for found in ranks) == 640
        expected = sum(found["rates"][name] * found["rows"][name] for found in ranks) / 640
        assert abs(alone["rates"][name] - expected) < 1e-12
    assert alone["rates"]["buy"] < alone["rates"]["click"]
