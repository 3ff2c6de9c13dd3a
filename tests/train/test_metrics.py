import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loka.core.exceptions import NonFinite
from loka.train import quality
from loka.train.metrics import Placements, divergences

# Few distinct values, so that most examples hold ties across the classes.
rows = st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 1)), min_size=2, max_size=40)


def counted_twice(logits, labels):
    """[N]: of each row twice the rows of the other class that a click outranks, or that outrank another
    row, ties as one; pair by pair."""
    counts = [0] * len(logits)
    for i in range(len(logits)):
        for j in range(len(logits)):
            if labels[i] == 1 and labels[j] == 0:
                won = 2 * (logits[i] > logits[j]) + (logits[i] == logits[j])
                counts[i] += won
                counts[j] += won
    return np.array(counts)


@settings(max_examples=200)
@given(rows)
def test_auc_and_placements_equal_counting_all_pairs(examples):
    logits, labels = (np.array(column) for column in zip(*examples, strict=True))
    counts, clicked = counted_twice(logits, labels), labels == 1
    found = Placements.of(logits.astype(float), clicked)
    assert found.clicks.tolist() == counts[clicked].tolist()
    assert found.others.tolist() == counts[~clicked].tolist()
    pairs = 2 * int(clicked.sum()) * int((~clicked).sum())
    expected = counts[clicked].sum() / pairs if pairs else math.nan
    assert quality(logits, labels).auc == pytest.approx(expected, abs=1e-15, nan_ok=True)


def test_predicting_the_base_rate_has_ne_one():
    labels = np.r_[np.ones(317), np.zeros(9683)]
    rate = labels.mean()
    result = quality(np.full(10_000, math.log(rate / (1 - rate))), labels)
    assert abs(result.ne - 1) < 1e-12
    assert abs(result.calibration - 1) < 1e-12
    assert result.auc == 0.5
    assert (result.rows, result.base_rate) == (10_000, rate)


def test_logloss_against_the_textbook_formula():
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=1000), rng.integers(0, 2, 1000)
    p = 1 / (1 + np.exp(-logits))
    textbook = -np.mean(labels * np.log(p) + (1 - labels) * np.log(1 - p))
    entropy = -(labels.mean() * np.log(labels.mean()) + (1 - labels.mean()) * np.log(1 - labels.mean()))
    result = quality(logits, labels)
    # Both are float64 sums of a thousand terms; 1 - p loses at most a few digits at |logit| < 4.
    assert result.logloss == pytest.approx(textbook, rel=1e-12)
    assert result.ne == pytest.approx(textbook / entropy, rel=1e-12)
    assert result.calibration == pytest.approx(p.sum() / labels.sum(), rel=1e-12)


def test_extreme_logits_stay_finite_and_exact():
    right = quality([800.0, -800.0], [1, 0])
    assert (right.logloss, right.auc, right.calibration) == (0.0, 1.0, 1.0)
    wrong = quality([-800.0, 800.0], [1, 0])
    assert (wrong.logloss, wrong.auc) == (800.0, 0.0)
    # exp(-40) of loss: computing softplus(40) - 40 instead would give 0
    assert quality([40.0, -40.0], [1, 0]).logloss == pytest.approx(math.exp(-40), rel=1e-12)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_saturated_logits_have_their_kl(sign):
    """Of two rare probabilities e^z and e^o it is e^z (z - o) + e^o - e^z, up to a share of e^z; none is 0."""
    z, step = np.array([10.0, 25.0, 40.0, 300.0]), 0.1
    found = divergences(sign * z, sign * (z - step))
    np.testing.assert_allclose(found, np.exp(-z) * (math.expm1(step) - step), rtol=1e-3)


def test_one_class_has_no_auc():
    result = quality([0.5, 1.0], [0, 0])
    assert math.isnan(result.auc)
    assert math.isnan(result.ne)
    assert math.isfinite(result.logloss)


def test_refused_inputs():
    with pytest.raises(NonFinite, match="1 of 3 logits"):
        quality([0.0, math.nan, 1.0], [0, 1, 1])
    with pytest.raises(ValueError, match="0 or 1"):
        quality([0.0, 1.0], [0, 0.5])
    with pytest.raises(ValueError, match=r"\(2,\) and labels \(3,\)"):
        quality([0.0, 1.0], [0, 1, 1])
