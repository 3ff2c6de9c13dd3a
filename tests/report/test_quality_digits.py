import math
from dataclasses import replace

from test_page import hostile_validation

from loka.core.error import Estimate
from loka.report.pages.page import page
from loka.report.validation_table import validation_table
from loka.validation.record import SeedPair
from loka.validation.verdicts import ERROR


def test_a_small_kl_of_pairs_keeps_its_digits():
    """Four decimals said 0.0006 +- 0.0000."""
    found = hostile_validation()
    pair = replace(found.arms[0].pairs[0].difference, kl_percent=Estimate(6.123e-4, 5.9e-4, 6.3e-4))
    arm = replace(found.arms[0], pairs=(SeedPair(seed=0, difference=pair),))
    found = replace(found, arms=(arm,))
    assert "in percent of NE: 0.000612 +- 1e-05." in page(validation=found)
    assert "0.000612 % [0.00059, 0.00063]" in validation_table(found)


def test_the_level_of_the_verdicts_interval_is_told():
    """With two tasks it is 97.5 %, and the figure said 95 %."""
    found = hostile_validation()
    average = found.arms[0].average
    narrow, wide = (replace(found.arms[0], average=replace(average, tail=tail)) for tail in (ERROR, ERROR / 2))
    alone, of_two = (page(validation=replace(found, arms=(arm,))) for arm in (narrow, wide))
    assert "These two are of 95 %. Shaded" in alone
    assert "These two are of 97.5 %, as those of all tasks and looks hold together at 95 %. Shaded" in of_two


def test_one_pair_tells_no_spread():
    """The reading by the mean of the weights said "nan % between pairs"."""
    found = hostile_validation()
    (arm, _) = found.arms
    of_one = replace(arm.average, variance=replace(arm.average.variance, pairs=1, between_pairs=math.nan))
    alone = replace(arm, average=of_one, segments=(), readings=(replace(of_one, name="by the mean of the weights"),))
    assert "between pairs where the verdict has" in validation_table(found)
    table = validation_table(replace(found, arms=(alone,)))
    assert "by the mean of the weights: +0.0040 % [-inf, +inf] (for reading)" in table
    assert "between pairs" not in table
