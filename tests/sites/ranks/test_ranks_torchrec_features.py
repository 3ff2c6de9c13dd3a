"""What of TorchRec was tried around converted layers: kinds of sharding and codecs of its exchange.

Losses by plan are compared with those of tables that lie whole on one rank each, in the same run. The table
in docs/torchrec.md is of this file.
"""

from dataclasses import dataclass

import pytest
import torch
from foreign.models import dlrm
from rank_models import LR, STEPS, forced, planned, probed, runs
from ranks import on_ranks
from test_ranks_torchrec import ROUNDING, ROWS, build, by_hand, dense, half, sharded

import loka
from loka.core.records.plan import Plan

pytest.importorskip("torchrec")
pytest.importorskip("fbgemm_gpu")

SHARDINGS = ("table_wise", "row_wise", "column_wise", "data_parallel")
CODECS = ("fp16", "bf16", "fp8", "int8")


@dataclass(frozen=True)
class Tried:
    plan: Plan

    def __call__(self, rank, folder):
        found = {}
        for name in (*SHARDINGS, *CODECS):
            kind, codec = (name, "") if name in SHARDINGS else ("table_wise", name)
            try:
                torch.manual_seed(0)
                model = loka.convert(sharded(build(), kind, codec), self.plan)
                trained = list(model.parameters()) if kind == "data_parallel" else dense(model)
                losses = by_hand(model, torch.optim.SGD(trained, LR), [[half(rank)]] * STEPS)
                found[name] = {"losses": [loss for (loss,) in losses], "runs": runs(model)}
            except Exception as error:
                found[name] = {"failed": f"{type(error).__name__}: {error}"}
        return found


@pytest.fixture(scope="module")
def plan():
    model = build()
    (batch,) = dlrm.batch(ROWS)
    return forced(probed(model, lambda step: model(batch)[0]))


@pytest.fixture(scope="module")
def tried(plan, tmp_path_factory):
    return on_ranks(Tried(plan), 2, tmp_path_factory.mktemp("tried"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SHARDINGS, *CODECS])
def test_converted_layers_run_behind_any_tables(tried, plan, name):
    """What exchanges in 16 or 8 bits moves losses by what its rounding does to embeddings of 0.1."""
    atol = {"fp16": 1e-3, "bf16": 1e-3, "int8": 1e-2}.get(name, ROUNDING)
    for rank in tried:
        if name == "fp8":
            assert rank[name] == {"failed": "RuntimeError: fp8 is not supported by CPU"}, "TorchRec's own"
            continue
        assert "failed" not in rank[name]
        assert rank[name]["runs"] == dict.fromkeys(planned(plan), STEPS)
        assert rank[name]["losses"] == pytest.approx(rank["table_wise"]["losses"], abs=atol, rel=0)
