import itertools
import json

import numpy as np
import pytest
from command_line import loka as run
from hypothesis import given
from hypothesis import strategies as st

from loka.core.exceptions import LokaError
from loka.scaling.depth import carried_on
from loka.scaling.lengths import LengthTimes, balanced, waits


@given(st.lists(st.floats(0, 1e6), min_size=8, max_size=40), st.integers(1, 4))
def test_each_row_once_and_never_worse(times, ranks):
    assert sorted(itertools.chain(*balanced(times, ranks))) == list(range(len(times)))
    random, even = waits(times * 4, ranks=ranks, batch_size=2)
    assert even.value <= random.value
    random, even = waits(times[:1] * 32, ranks=ranks, batch_size=2)
    assert random == even


def test_by_hand():
    times = LengthTimes(lengths=(0, 10, 20), us={"bf16": (1, 6, 16)})
    assert times.of("bf16", [0, 5, 15, 20]).tolist() == [1, 3.5, 11, 16]
    assert [value.value for value in waits([1.0, 8] * 4, ranks=1, batch_size=2)] == [9, 9]
    with pytest.raises(LokaError, match=r"no times of 'fp8' were measured(.|\n)*one of bf16"):
        times.of("fp8", [5])


def test_intervals_hold_what_other_rows_take():
    rng = np.random.default_rng(0)
    many = [waits(rng.lognormal(size=8192), ranks=8, batch_size=32) for _ in range(40)]
    truth = np.mean([[each.value for each in found] for found in many], axis=0)
    held = np.zeros(2)
    for _ in range(100):
        for at, found in enumerate(waits(rng.lognormal(size=8 * 256), ranks=8, batch_size=32)):
            held[at] += found.low <= truth[at] <= found.high
    assert (held > 86).all(), held  # of 100, by 95 %: 86 or fewer in 1 of 2,000


BROKEN = (
    ({"lengths": [10, 0]}, "ascend"),
    ({"us": {"plan": [1, -2]}}, "0 or more"),
    ({"us": {"plan": [1]}}, "for each length"),
    ({"of": [3, 11, 12, 10] * 2}, "50 % of the lengths are outside of 0 to 10"),
    ({"us": {"plan": [0, 1e308]}}, "at most 1e+308 us"),
    ({"of": [1] * 7}, "at least 8 are needed"),
)


@pytest.mark.parametrize(("change", "said"), [({}, "15 [15, 15] balanced"), *BROKEN])
def test_files(change, said, tmp_path):
    table = {"lengths": [0, 10], "us": {"plan": [0, 15]}, "of": [10] * 8} | change
    for name, held in (("l", table.pop("of")), ("t", table)):
        (tmp_path / name).write_text(json.dumps(held))
    asked = ("t", "l", "--gpus", 2, "--batch-size", 1)
    assert said in run("scale", "lengths", *asked, cwd=tmp_path, fails=bool(change))


def test_a_line_of_depths():
    drift = [1 + at / 100 for at in range(21)]
    two, three = ([us * one for one in drift] for us in (17, 22))
    assert carried_on({2: two, 3: three}, 8).value == pytest.approx(47 * 1.1)
    for wrong in ({2: two}, {2: two, 9: three}, {2: three, 3: two}, {2: [1], 3: three}):
        with pytest.raises(LokaError):
            carried_on(wrong, 8)
