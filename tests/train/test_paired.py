import json
from dataclasses import asdict

import numpy as np
import pytest

from loka.core.error import Estimate
from loka.train import PairedDifference, across_pairs, paired_difference, quality, verdict


def world(rng, rows):
    """True logits, and those of two imperfect models; b has extra noise of its own."""
    true = rng.normal(-1, 1.2, rows)
    a = true + rng.normal(0, 0.3, rows)
    return true, a, a + rng.normal(0.05, 0.3, rows)


def chance(logits):
    return 1 / (1 + np.exp(-logits))


def true_differences():
    """Expected differences over the population, from half a million rows with soft labels."""
    true, a, b = world(np.random.default_rng(12345), 500_000)
    p = chance(true)

    def loss(x):
        return float((p * np.logaddexp(0, -x) + (1 - p) * np.logaddexp(0, x)).mean())

    def auc(x):
        q = p[np.argsort(x)]
        return float((q * np.cumsum(1 - q)).sum() / (q.sum() * (1 - q).sum()))

    return (
        100 * (loss(b) / loss(a) - 1),
        auc(b) - auc(a),
        float((chance(b) - chance(a)).sum() / p.sum()),
    )


def test_intervals_cover_the_truth_as_often_as_they_say():
    truth = true_differences()
    simulations = 300
    covered = np.zeros(3)
    for seed in range(simulations):
        rng = np.random.default_rng(seed)
        true, a, b = world(rng, 600)
        labels = rng.random(600) < chance(true)
        pair = paired_difference(a, b, labels, seed=seed, resamples=200)
        estimates = (pair.ne_percent, pair.auc, pair.calibration)
        covered += [e.low <= t <= e.high for e, t in zip(estimates, truth, strict=True)]
    # 95 % over 300 simulations has a standard deviation of 1.3 %.
    assert (covered / simulations >= 0.90).all(), covered
    assert (covered / simulations <= 0.99).all(), covered


def test_estimates_are_the_differences_of_quality():
    rng = np.random.default_rng(0)
    true, a, b = world(rng, 2000)
    b = b.round(1)  # ties
    labels = rng.random(2000) < chance(true)
    before, after = quality(a, labels), quality(b, labels)
    pair = paired_difference(a, b, labels, resamples=20)
    assert pair.ne_percent.value == pytest.approx(100 * (after.ne - before.ne) / before.ne, rel=1e-9)
    assert pair.auc.value == pytest.approx(after.auc - before.auc, abs=1e-14)
    assert pair.calibration.value == pytest.approx(after.calibration - before.calibration, abs=1e-12)
    assert pair.rows == 2000


def test_identical_predictions_differ_by_exactly_zero():
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=500), rng.integers(0, 2, 500)
    pair = paired_difference(logits, logits, labels, resamples=50)
    zero = Estimate(0.0, 0.0, 0.0)
    assert (pair.ne_percent, pair.auc, pair.calibration) == (zero, zero, zero)
    assert pair.verdict == "pass"


def test_pairing_resolves_what_unpaired_rows_cannot():
    rng = np.random.default_rng(0)
    true, a, _ = world(rng, 20_000)
    labels = rng.random(20_000) < chance(true)
    near, other = a + rng.normal(0, 0.003, 20_000), rng.permutation(a)
    close = paired_difference(a, near, labels, resamples=5).ne_percent
    far = paired_difference(a, other, labels, resamples=5).ne_percent
    assert close.high - close.low < 0.02 < far.high - far.low


def test_the_seed_repeats_the_bootstrap():
    rng = np.random.default_rng(0)
    true, a, b = world(rng, 400)
    labels = rng.random(400) < chance(true)
    first = paired_difference(a, b, labels, seed=1, resamples=50)
    assert first == paired_difference(a, b, labels, seed=1, resamples=50)
    assert first != paired_difference(a, b, labels, seed=2, resamples=50)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-0.019, 0.0199, "pass"),
        (0.021, 0.05, "fail"),
        (-0.05, -0.021, "fail"),
        (0.01, 0.03, "undecided"),
        (-0.03, 0.03, "undecided"),
    ],
)
def test_verdict(low, high, expected):
    assert verdict(Estimate((low + high) / 2, low, high)) == expected


def pair_of(ne_percent):
    wide = Estimate(ne_percent, ne_percent - 1, ne_percent + 1)
    return PairedDifference(wide, Estimate(0.0, -1.0, 1.0), Estimate(0.0, -1.0, 1.0), rows=10)


def test_across_pairs_is_a_student_t_interval_over_pairs():
    # BF16 against FP32 in four pairs; 3.1824 is t at 97.5 % with three degrees of freedom.
    result = across_pairs([pair_of(value) for value in (-0.0016, -0.0081, 0.0061, 0.0065)])
    assert result.pairs == 4
    assert result.ne_percent.value == pytest.approx(0.000725, abs=1e-9)
    half = 3.1824 * np.std([-0.0016, -0.0081, 0.0061, 0.0065], ddof=1) / 2
    assert result.ne_percent.high - result.ne_percent.value == pytest.approx(half, rel=1e-4)
    assert result.verdict == "pass"
    with pytest.raises(ValueError, match="at least two"):
        across_pairs([pair_of(0.0)])


def test_a_difference_is_json():
    pair = pair_of(0.01)
    assert json.loads(json.dumps(asdict(pair), allow_nan=False))["ne_percent"]["value"] == 0.01


def test_one_class_is_refused():
    with pytest.raises(ValueError, match="both classes"):
        paired_difference([0.0, 1.0], [0.0, 1.0], [0, 0])
