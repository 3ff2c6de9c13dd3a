"""Values that a user sets are refused where they make no sense, before any work is done."""

import math

import pytest

from loka.core.budget import Budget
from loka.measurement import Settings


@pytest.mark.parametrize(
    "wrong",
    [{"rows": 0}, {"min_draws": 1}, {"max_draws": 3}, {"interval_db": math.inf}, {"max_rounds": 0}, {"tie": -0.01}],
)
def test_settings(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Settings(**wrong)


@pytest.mark.parametrize("wrong", [{"max_mere": math.inf}, {"min_sqnr_db": -math.inf}, {"min_speedup": math.nan}])
def test_budgets(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Budget(**wrong)
