import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka.core.recipe import Granularity

SIDES = st.integers(0, 300)


@given(SIDES, SIDES)
def test_a_whole_side_is_one_group_and_no_group_is_empty(rows, columns):
    whole_rows, whole_columns = max(rows, 1), max(columns, 1)
    assert Granularity.TENSOR.group(rows, columns) == (whole_rows, whole_columns)
    assert Granularity.ROW.group(rows, columns) == (1, whole_columns)


@pytest.mark.parametrize("sides", [(0, 0), (5, 5), (1000, 1000)])
def test_fixed_groups_do_not_follow_the_tensor(sides):
    assert Granularity.GROUP_1X128.group(*sides) == (1, 128)
    assert Granularity.BLOCK_128X128.group(*sides) == (128, 128)
