import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka.core.numerics.label_rate import LEAST, LabelRate, task_rates


def entropy(q):
    return -q * np.log(q) - (1 - q) * np.log(1 - q)


def rate(share, rows=10_000):
    return LabelRate(positives=share * rows, rows=rows)


def spread(several):
    """Variance over draws; of 20,000 it has a relative standard error of 1 %."""
    return float(np.var(np.log(several)))


@pytest.mark.parametrize("share", [0.03, 0.2, 0.7])
def test_the_variance_is_that_of_labels_drawn_again(share):
    rows = 200_000  # the formula is of first order
    drawn = np.random.default_rng(0).binomial(rows, share, size=20_000) / rows
    assert rate(share, rows).log_variance == pytest.approx(spread(entropy(drawn)), rel=0.05)


def test_tasks_with_rates_of_their_own_are_counted_independently():
    rows, shares = 200_000, (0.03, 0.3)
    generator = np.random.default_rng(0)
    drawn = sum(entropy(generator.binomial(rows, share, size=20_000) / rows) for share in shares)
    found = task_rates([rate(share, rows) for share in shares], 2)
    assert found.shares == shares
    assert found.log_variance == pytest.approx(spread(drawn), rel=0.05)


def test_a_known_share_beside_a_counted_one_adds_to_h_and_not_to_its_variance():
    drawn = entropy(np.random.default_rng(0).binomial(200_000, 0.03, size=20_000) / 200_000)
    found = task_rates([rate(0.03, 200_000), 0.5], 2)
    assert found.log_variance == pytest.approx(spread(drawn + entropy(0.5)), rel=0.05)
    assert task_rates([0.1, 0.5], 2).log_variance == 0


@given(st.floats(0.001, 0.999), st.integers(1, 5))
def test_one_rate_for_all_tasks_has_its_own_variance(share, tasks):
    counted, known = task_rates(rate(share), tasks), task_rates(share, tasks)
    assert counted.shares == (rate(share).share,) * tasks
    assert counted.log_variance == rate(share).log_variance
    assert (known.shares, known.log_variance) == ((share,) * tasks, 0)


@given(st.integers(LEAST, 1000), st.integers(LEAST, 1000))
def test_enough_labels_of_each_kind_are_known(positives, negatives):
    counted = LabelRate(positives=positives, rows=positives + negatives)
    assert counted.unsupported == ""
    assert counted.share == positives / (positives + negatives)
    assert math.isfinite(counted.log_variance)


@pytest.mark.parametrize(
    ("positives", "rows", "why"),
    [
        (0, 0, "no labels were read"),
        (0, 50, "all 50 labels are negative"),
        (50, 50, "all 50 labels are positive"),
        (LEAST - 1, 50, "9 positive labels of 50"),
        (50 - LEAST + 1, 50, "9 negative labels of 50"),
    ],
)
def test_too_few_labels_of_a_kind_say_so(positives, rows, why):
    counted = LabelRate(positives=positives, rows=rows)
    assert counted.unsupported.startswith(why)
    assert task_rates(counted, 2).unsupported == counted.unsupported
    assert task_rates([counted], 1).unsupported == counted.unsupported
    assert task_rates([0.5, counted], 2).unsupported == f"task 1: {counted.unsupported}"
    if not 0 < positives < rows:
        assert counted.log_variance == math.inf


@pytest.mark.parametrize(("positives", "rows"), [(-1, 5), (6, 5), (math.nan, 5)])
def test_counts_that_cannot_be_are_refused(positives, rows):
    with pytest.raises(ValueError, match="cannot be"):
        LabelRate(positives=positives, rows=rows)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_a_share_lies_between_none_and_all(share):
    with pytest.raises(ValueError, match="between 0 and 1"):
        task_rates(share, 1)


def test_each_task_has_a_rate():
    with pytest.raises(ValueError, match="2 shares, and the logits are of 3 tasks"):
        task_rates([0.1, 0.2], 3)
