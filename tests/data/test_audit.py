import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loka.core.exceptions import LokaError, UnknownName
from loka.data import Share, audit


@given(rows=st.integers(1, 40), hits=st.integers(0, 40), percent=st.integers(1, 99))
def test_the_p_value_is_the_binomials(rows, hits, percent):
    hits, p = min(hits, rows), percent / 100
    column = torch.tensor([7.0] * hits + [1.0] * (rows - hits))
    (found,) = audit({"c": column}, [Share(column="c", value=7, share=p)]).parts
    chance = [math.comb(rows, k) * p**k * (1 - p) ** (rows - k) for k in range(rows + 1)]
    tail = sum(chance[: hits + 1]) if hits <= p * rows else sum(chance[hits:])
    assert found.p == pytest.approx(min(1, 2 * tail), rel=1e-9)


def test_false_alarms_and_a_part_that_is_absent():
    traffic = [Share(column="domain", value=v, share=s) for v, s in enumerate((0.6, 0.3, 0.08, 0.02))]
    traffic.append(Share(column="size", at_most=math.log(2), share=0.5))
    draw, alarms = torch.Generator().manual_seed(0), 0
    for _ in range(400):
        domain = torch.multinomial(torch.tensor([0.6, 0.3, 0.08, 0.02]), 2000, replacement=True, generator=draw)
        size = torch.empty(2000).exponential_(generator=draw)
        alarms += bool(audit({"domain": domain, "size": size}, traffic).apart)
    assert alarms <= 30  # 5 % of 400 at most are meant: 20, and 2.3 standard deviations
    domain[domain == 3] = 0
    found = audit({"domain": domain, "size": size}, traffic)
    assert "domain = 3" in [str(part.of) for part in found.apart]
    assert "less than in the traffic" in str(found)


def test_too_few_rows_say_so():
    few = audit({"c": torch.zeros(100)}, [Share(column="c", value=3, share=0.02)]).parts[0]
    assert (few.apart, few.lacking) == (False, math.ceil(math.log(0.025) / math.log(0.98)) - 100)
    tail = audit({"c": torch.zeros(100)}, [Share(column="c", at_most=1, share=0.98)]).parts[0]
    assert tail.lacking == few.lacking, "nor whether all is there"
    assert few.verdict == f"cannot tell: {few.lacking} more rows needed"
    assert audit({"c": torch.zeros(100 + few.lacking)}, [few.of]).parts[0].apart


def test_a_difference_within_what_is_allowed():
    column = torch.arange(1_000_000) % 1000
    for part in (Share(column="c", at_most=20, share=0.02), Share(column="c", at_most=950, share=0.98)):
        (told,), (allowed,) = (audit({"c": column}, [part], within=w).parts for w in (0.0, 0.06))
        assert (told.apart, allowed.verdict) == (True, "alike")
        assert audit({"c": column}, [part], within=0.01).parts[0].apart, "further off than that"
    few = audit({"c": torch.zeros(100)}, [Share(column="c", value=3, share=0.02)], within=0.5).parts[0]
    assert few.lacking == math.ceil(math.log(0.025) / math.log(0.99)) - 100
    with pytest.raises(ValueError, match="within=1"):
        audit({"c": column}, [part], within=1)


def test_missing_values_and_parts_that_nobody_has():
    column = torch.tensor([float("nan")] * 30 + [1.0] * 70)
    missing, never = Share(column="c", value=math.nan, share=0.3), Share(column="c", value=1, share=0)
    found = audit({"c": column}, [missing, never])
    assert [part.verdict for part in found.parts] == ["alike", "more than in the traffic"]


@pytest.mark.parametrize(
    ("values", "part", "hits"),
    [
        (torch.arange(256).byte(), {"at_most": 256}, 256),
        (torch.full((9,), 44).byte(), {"value": 300}, 0),
        (torch.tensor([2**24, 2**24 + 1]), {"value": 2**24 + 1}, 1),
        (torch.arange(1_700_000_000, 1_700_000_100), {"at_most": 1_700_000_049.5}, 50),
        (torch.arange(9), {"at_most": math.inf}, 9),
        (torch.tensor([2**63 + 5, 7, 2**64 - 1], dtype=torch.uint64), {"at_most": 1000}, 1),
        (torch.tensor([2**63 + 5, 2**63 + 6], dtype=torch.uint64), {"value": 2**63 + 5}, 1),
        (torch.tensor([2**63 + 5, 7], dtype=torch.uint64), {"value": -(2**63) + 5}, 0),
        (torch.arange(9), {"at_most": -1e30}, 0),
        (torch.arange(9), {"value": 0.5}, 0),
        (torch.tensor([0.1, math.nan]), {"value": 0.1}, 1),
        (torch.tensor([0.1, math.nan]), {"at_most": math.nan}, 0),
    ],
)
def test_integers_are_compared_exactly(values, part, hits):
    assert Share(column="c", share=0.5, **part).hits(values) == hits


def test_neighbours_do_not_look_alike():
    parts = [{"value": 2**53 + 2}, {"at_most": 1_700_000_049.5}, {"value": math.nan}]
    said = ["c = 9007199254740994", "c <= 1700000049.5", "c = nan"]
    assert [str(Share(column="c", share=0.5, **part)) for part in parts] == said


@pytest.mark.parametrize("wrong", [{}, {"value": 1, "at_most": 2}, {"value": 1, "share": 1.5}])
def test_a_share_is_of_one_part(wrong):
    with pytest.raises(ValueError, match="a share between 0 and 1"):
        Share(**{"column": "c", "share": 0.5, **wrong})


def test_what_cannot_be_audited_is_refused():
    share = Share(column="c", value=1, share=0.5)
    assert str(audit({"c": [1, 0] * 9}, [share])) == str(audit({"c": torch.tensor([1, 0] * 9)}, [share]))
    with pytest.raises(UnknownName, match="one of d"):
        audit({"d": torch.ones(3)}, [share])
    with pytest.raises(LokaError, match="no rows"):
        audit({"c": torch.ones(0)}, [share])
    with pytest.raises(LokaError, match=r"column 'c' is \[3, 2\], not \[rows\]"):
        audit({"c": torch.ones(3, 2)}, [share])
    for wrong in ({"traffic": []}, {"traffic": [share], "level": 0}):
        with pytest.raises(ValueError, match="level"):
            audit({"c": torch.ones(3)}, **wrong)
