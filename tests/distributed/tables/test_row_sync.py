from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ranks import on_ranks
from row_jobs import (
    ROWS,
    WIDTH,
    Counted,
    Trained,
    as_one_group,
    in_turn,
    lookups_that_train_nothing,
    mean_of_whole_tables,
    not_a_number,
    refused,
)
from torch import nn

from loka.distributed.replicas import sum_of_bits
from loka.distributed.tables.lookups import lookups_of
from loka.distributed.tables.row_sync import RowSync
from loka.train import RowwiseAdagrad

TRAINED = ("one.weight", "bag.weight")
STEP = 0.01 * 5.0  # lr times more than the largest gradient of a row that is looked up once
HALF = 2.0**-4  # of e4m3, relative, in the middle of its range


def values(found, when="after"):
    return {name: np.array(found[when][name]) for name in TRAINED}


def alike(answers):
    for answer in answers[1:]:
        assert answer["after"] == answers[0]["after"], "replicas differ after flush"


def test_in_float32_it_is_the_mean_of_whole_tables(tmp_path):
    """w0 + (d0 + d1) / 2 for (w0 + d0 + w0 + d1) / 2: 12 times some roundings of numbers up to 4."""
    synced = Trained(12, {"every": 1, "codec": "fp32"})
    answers, (expected, _) = in_turn(synced, mean_of_whole_tables, ranks=2, folder=tmp_path)
    alike(answers)
    assert answers[0]["sums"] == answers[1]["sums"], "after every step"
    for name, found in values(answers[0]).items():
        assert np.abs(found - np.array(expected["after"][name])).max() <= 12 * 4 * 2.0**-22
        changed = (found != np.array(answers[0]["first"][name])).any(axis=1)
        assert 0.2 * len(found) < changed.sum() < 0.9 * len(found)
    assert answers[0]["after"]["frozen.weight"] == answers[0]["first"]["frozen.weight"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_rounding_leaves_comes_later(ranks, tmp_path):
    """Steps do not depend on the weights here, so both sums are of the same changes: what is missing at any
    time is one rounding a replica, and nothing after a flush but float32's."""
    plain = Trained(24, {"every": 3, "codec": "fp32"})
    rounded = Trained(24, {"every": 3, "codec": "e4m3", "exact_every": 1000})
    exact, coarse = in_turn(plain, rounded, ranks=ranks, folder=tmp_path)
    alike(coarse)
    for name in TRAINED:
        late = np.abs(values(coarse[0], "before")[name] - values(exact[0], "before")[name]).max()
        assert 1e-5 < late <= 3 * 4 * STEP * HALF, "an e4m3 rounding of three steps, each of up to four lookups"
        over = np.abs(values(coarse[0])[name] - values(exact[0])[name]).max()
        assert over <= 24 * 4 * 2.0**-22


def test_every_so_often_it_is_exact(tmp_path):
    """The third of three exchanges is: without a flush, replicas stand where float32 brings them."""
    coarse = [Trained(12, {"every": 4, "codec": codec, "exact_every": 3}) for codec in ("e4m3", "int8", "bf16")]
    exact, *others = in_turn(Trained(12, {"every": 4, "codec": "fp32"}), *coarse, ranks=2, folder=tmp_path)
    for job, found in zip(coarse, others, strict=True):
        for name in TRAINED:
            off = np.abs(values(found[1], "before")[name] - values(exact[0], "before")[name]).max()
            assert off <= 48 * 2.0**-22, job
        assert found[0]["sums"][7] != exact[0]["sums"][7], f"the second is not: {job}"


def test_an_exchange_that_takes_steps_loses_none_of_them(tmp_path):
    jobs = [
        Trained(21, {"every": 4, "codec": "fp32"}),
        Trained(21, {"every": 4, "codec": "fp32", "staleness": 3}),
        Trained(21, {"every": 4, "codec": "e4m3", "staleness": 2}),
    ]
    now, late, coarse = in_turn(*jobs, ranks=2, folder=tmp_path)
    alike(late)
    for name in TRAINED:
        assert np.abs(values(late[0])[name] - values(now[0])[name]).max() <= 21 * 4 * 2.0**-22
    assert late[0]["sums"][4] != now[0]["sums"][4], "at that step it was under way"
    alike(coarse)
    for name in TRAINED:
        assert np.abs(values(coarse[0])[name] - values(now[0])[name]).max() <= 21 * 4 * 2.0**-22


@pytest.mark.parametrize("optimizer", ["row-wise", "Adagrad"])
def test_state_goes_with_the_rows(optimizer, tmp_path):
    """The first makes its state in its first step: it was zero before."""
    answers = on_ranks(Trained(10, {"every": 5}, optimizer=optimizer), 2, tmp_path)
    alike(answers)
    mine, others = ([table["sum"] for table in answer["states"]] for answer in answers)
    assert mine == others
    assert all(np.array(table).any() for table in mine)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tables_of_sixteen_bits(dtype, tmp_path):
    answers = on_ranks(Trained(8, {"every": 2}, dtype=dtype), 2, tmp_path)
    alike(answers)
    assert all((now != np.array(answers[0]["first"][name])).any() for name, now in values(answers[0]).items())


def test_bytes_are_those_that_arrive(tmp_path):
    answers = on_ranks(Counted(Trained(16, {"every": 4, "exact_every": 100})), 2, tmp_path)
    for answer, other in zip(answers, answers[::-1], strict=True):
        traffic = answer["traffic"]
        assert traffic["syncs"] == 5
        assert traffic["received"] == answer["received"], "what is padded to the longer one, and the counts"
        # Ids of 8 bytes; 24 bytes and a scale in four exchanges, 24 float32 in the last, which is a flush's.
        coarse = other["traffic"]["rows"] * (8 + WIDTH + 4)
        assert coarse < traffic["received"] < 4 * coarse
        assert traffic["whole"] == 5 * 4 * WIDTH * (ROWS + ROWS // 2)


def test_a_number_that_is_none_reaches_all_and_stays_in_its_row(tmp_path):
    for answer in on_ranks(not_a_number, 2, tmp_path):
        assert answer == {"first": [4], "after": [4]}


def test_rows_are_counted_once_and_only_where_they_may_change(tmp_path):
    for answer in on_ranks(lookups_that_train_nothing, 2, tmp_path):
        assert answer == {"none": 0, "rows": 2, "left": False}


def test_what_does_not_fit_is_refused(tmp_path):
    for found in on_ranks(refused, 2, tmp_path):
        assert "staleness < every" in found["late"]
        assert "no table" in found["no table"]
        assert "e4m3" in found["codec"]
        assert "torch.float64" in found["float64"]
        assert "replica 1: weight (8, 4)" in found["values"]
        assert "replica 1: weight (9, 4)" in found["shapes"]
        assert "codec='e4m3', optimizer=NoneType, one_group=False\n  rank 1: every=16" in found["settings"]
        assert "one_group=False\n  rank 1: the model has no table" in found["one cannot"]
        assert "rows changed that nothing had looked up" in found["all rows"]
        assert "one.weight (200, 24) torch.float32, bits" in found["all rows"]
        assert "state momentum_buffer of weight is a sparse tensor" in found["sparse state"]
        assert "one.weight, state 1 (200, 24) torch.float32, bits" in found["state of all rows"]
        assert "replica 1: weight, state 1 (8, 4)" in found["state"]
        assert "weight: Adagrad moves it" in found["one group"]
        assert "weight holds torch.bfloat16" in found["one group of 16 bits"]
        assert "weight: no optimizer that was passed moves it" in found["one group by nothing"]
        assert "replica 1: step 1, coded, rates" in found["rates"]
        assert "row-wise AdaGrad with weight_decay" in found["one rank decays"] or (
            "replica 1 says why" in found["one rank decays"]
        )
        assert "states of 0.weight 2, 1.weight 0" in found["some states"]
        assert "states of 0.weight 0, 1.weight 2" in found["some states"]
        assert "1.weight" in found["unfrozen"]
        assert "weight: max_norm moves it" in found["max_norm"]
        assert "replica 0: step 2" in found["steps"]
        assert "replica 1: step 3" in found["steps"]


def test_the_same_numbers_in_other_places_are_told_apart():
    """Also what one bit differs by, in tensors of any shape."""
    weight = torch.arange(12.0).view(3, 4)
    other = weight.clone()
    other[2, 3] = 11.000001
    told = [sum_of_bits(one) for one in (weight, weight.flip(0), weight.flip(1), other)]
    assert len(set(told)) == 4
    assert told[0] == sum_of_bits(weight.clone()) == sum_of_bits(weight.t().contiguous().t())
    assert sum_of_bits(torch.tensor(2.0)) != sum_of_bits(torch.tensor(3.0))


def test_plain_tables_as_one_group(tmp_path):
    """Differences of w and V in float32, and lr / D of them: 12 steps of some 2^-20 of numbers up to 4."""
    for found in on_ranks(as_one_group, 2, tmp_path):
        for name, right in found["one"].items():
            np.testing.assert_allclose(found["two"][name], right, rtol=2e-4, atol=2e-4)


def test_when_exchanges_begin_end_and_are_checked(monkeypatch):
    told = []

    def begin(sync, *, exact):
        told.append(f"{sync._steps} {'exact' if exact else 'coded'}")
        sync._flight = SimpleNamespace(begun=sync._steps)
        sync.traffic.syncs += 1

    def finish(sync):
        if sync._flight is not None:
            told.append(f"{sync._steps} agreed")
            sync._flight = None

    monkeypatch.setattr(RowSync, "_begin", begin)
    monkeypatch.setattr(RowSync, "_finish", finish)
    monkeypatch.setattr(RowSync, "_check", lambda sync: told.append(f"{sync._steps} checked"))
    sync = RowSync([], {}, None, every=2, exact_every=4, staleness=1, codec="int8", one_group=False)
    for _ in range(9):
        sync.step()
    first = ["2 coded", "3 agreed", "4 coded", "4 agreed", "4 checked", "6 coded", "7 agreed"]
    assert told == [*first, "8 exact", "8 agreed", "8 checked"]


@pytest.mark.parametrize("option", [{"scale_grad_by_freq": True}, {"max_norm": 1.0}])
def test_a_table_that_something_else_scales_is_not_row_wise_adagrads_alone(option):
    table = nn.Embedding(8, 4, **option)
    (lookup,) = lookups_of(table, RowwiseAdagrad(table.parameters(), lr=0.1))
    assert lookup.adagrad() == next(iter(option))
