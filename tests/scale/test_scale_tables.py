import sys
from dataclasses import replace

import pytest
import torch
from command_line import loka as run
from networks import EXAMPLE, ROWS, exactly, network
from torch import nn

from loka.core.exceptions import LokaError, MissingLibrary
from loka.scaling.cluster import scale_across
from loka.scaling.cluster.collectives import Wire, wire_us
from loka.scaling.cluster.pricing import _exchanged
from loka.scaling.cluster.tables import Tables, exchange, parsed


def test_bytes_by_hand():
    """Tables of 100, 60 and 50 rows of 16: the largest alone, the others on the other GPU."""
    found = exchange(Tables(shapes=((60, 16), (100, 16), (50, 16)), ids=3, qcomm="fp8"), 2, 8)
    assert found.held == 4 * 110 * 17
    assert found.pooled.size == 2 * 8 * 32 * 1
    assert found.ids.size == 2 * 8 * 3 * 2 * 8
    assert found.looked_up == 2 * 8 * 3 * (32 * 4 + 2 * 8) + 2 * 8 * 32 * (4 + 1)
    assert found.updated == 2 * 8 * 32 * 1 + 2 * 8 * 3 * (8 * 32 + 8 * 2)
    more = exchange(Tables(shapes=((100, 16),) * 4), 64, 8)  # a table on each of four, for all 64
    assert (more.held, more.pooled.size) == (4 * 100 * 17, 64 * 8 * 16 * 2)
    rows = exchange(Tables(shapes=((101, 16), (60, 8)), ids=3, by="rows", qcomm="fp32"), 4, 8)  # of each GPU a part
    assert (rows.held, rows.pooled.size) == (4 * (26 * 17 + 15 * 9), 0)
    assert rows.summed.size == 4 * 8 * (16 + 8) * 4
    assert rows.looked_up == 4 * 8 * 3 * ((16 + 8) / 4 * 4 + 2 / 4 * 8) + 4 * 8 * (16 + 8) * (4 + 4)
    assert parsed("26x1000x128") == ((1000, 128),) * 26


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(1000, 2048)
        self.top = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048))

    def forward(self, ids):
        return self.top(self.table(ids))


def across(**options):
    quiet = replace(network(inside=(2, 100), launch=1, memory=1000), elementwise_share=exactly(1e-12))
    ids = torch.zeros(4, 3, dtype=torch.long)
    return scale_across(Model(), ids, network=quiet, gpus=(8,), batch_size=ROWS, **options)


@pytest.mark.slow
def test_a_step_waits_for_lookups_embeddings_and_their_gradients():
    without, with_, small = across(), across(ids=3), across(ids=3, qcomm="fp8")
    net = network(inside=(2, 100), launch=1, memory=1000)
    told = exchange(Tables(shapes=((1000, 2048),), ids=3), 8, ROWS)
    us = 2 * wire_us(told.pooled, 8, net) + (told.looked_up + told.updated) / 1e6
    for row, other, eight in zip(without.rows, with_.rows, small.rows, strict=True):
        if row.engine == "ddp" and row.plain:  # FSDP2 gathers while embeddings are looked up
            assert other.planned.value - row.planned.value == pytest.approx(us, rel=0.02)
        assert eight.planned.value < other.planned.value
        assert other.speedup.value < row.speedup.value or not row.plain
    assert with_.memory["8 ddp"]["tables"] == 4 * 1000 * 2049
    assert "tables: 1 of 2048000 elements, 3 ids a sample" in str(with_)
    assert "not in it: tables of 2048000 elements" in str(without)
    given = across(tables=((500, 64),))
    assert "tables: 1 of 32000 elements, 1 ids" in str(given)


_TWO = {"table_group": 4, "sync_every": 1}


def test_two_dimensions_by_hand():
    """Groups of 2 in 8 GPUs: two tables of 100 rows of 16, each on a GPU of every group, for its 2 x 8 rows.
    Every fourth GPU is in a group, as in DMPCollection; four that follow one another have the same table."""
    shapes = ((100, 16),) * 2
    flat = exchange(Tables(shapes=shapes), 2, 8)
    found = exchange(Tables(shapes=shapes, group=2, every=10), 8, 8)
    assert replace(flat.pooled, stride=4) == found.pooled
    assert (found.held, found.updated, flat.sync) == (flat.held, flat.updated, ())
    assert found.sync == tuple(Wire("all_reduce", 4 * size, ranks=4) for size in (100 * 16, 100))
    often, seldom, never = (across(ids=3, **two) for two in (_TWO, {**_TWO, "sync_every": 50}, {}))
    one = exchange(Tables(shapes=((1000, 2048),), group=4, every=1), 8, ROWS)
    us = sum(wire_us(wire, 8, network(inside=(2, 100), launch=1, memory=1000)) for wire in one.sync)
    for a, b, c in zip(often.rows, seldom.rows, never.rows, strict=True):
        assert a.planned.value - b.planned.value == pytest.approx(us * 49 / 50, rel=1e-6)
        assert b.parts.sent < c.parts.sent  # exchanged among 4 and not among 8


def test_torchrecs_planner_shards_by_rows_what_no_gpu_holds():
    """2e9 rows of 128 are 1.02 TB; 16 GPUs of 151 GB hold 64.5 GB of them each, and read a 16th of ids. Eight
    small tables are whole, one or two on the fullest GPU."""
    pytest.importorskip("torchrec")
    asked = Tables(shapes=((2_000_000_000, 128), *((1000, 64),) * 8), ids=2, by="torchrec")
    found, rows = exchange(asked, 16, 8, network(), 151e9), 16 * 8
    assert "1 row_wise" in found.how
    assert found.summed == Wire("reduce_scatter", rows * 128 * 2, ranks=16)
    assert [one.wire.op for one in _exchanged(found, backward=True)] == ["all_to_all", "all_gather"]
    small = found.pooled.size / (rows * 64 * 2)
    assert small in (1, 2)
    assert found.ids.size == rows * 2 * 8 * (small + 1 / 16)
    assert found.held == pytest.approx(4 * 2e9 / 16 * 129, rel=1e-3)
    for ranks, capacity, told in ((2, 151e9, "no place"), (512, 151e9, "for 512 GPUs"), (16, 0, "of 0 GB")):
        with pytest.raises(LokaError, match=told):
            exchange(asked, ranks, 8, network(), capacity)


def test_without_torchrec(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchrec", None)
    with pytest.raises(MissingLibrary, match="--tables-by size"):
        across(ids=3, tables_by="torchrec")


@pytest.mark.parametrize(
    "options",
    [
        {"qcomm": "fp8"},
        {"ids": float("inf")},
        {"ids": 0.0},
        {"ids": 1.0, "qcomm": "int3"},
        {"tables": ((0, 4),)},
        _TWO,
        {"ids": 1.0, "tables_by": "luck"},
        {"ids": 1.0, "table_group": 4},
        {"ids": 1.0, **_TWO, "table_group": 3},
    ],
)
def test_tables_that_cannot_be(options):
    with pytest.raises(
        LokaError, match=r"ids a sample|one of (fp32, bf16, fp8|size, rows, torchrec|2, 4)|give both: |--ids"
    ):
        across(**options)


@pytest.mark.slow
def test_the_command(tmp_path):
    ask = ("scale", "dcnv2", "--network", EXAMPLE, "--gpus", 8)
    text = run(*ask, "--table", "2x1000x16", "--table", "1x50x8", "--ids", 2, cwd=tmp_path)
    assert "tables: 3 of 32400 elements, 2 ids a sample in each, embeddings in bf16" in text
    assert "number x rows x width" in run(*ask, "--table", "many", cwd=tmp_path, fails=2)
    assert "--network too" in run("scale", "dcnv2", "--ids", 2, cwd=tmp_path, fails=2)
