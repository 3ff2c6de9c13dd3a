import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loka.core.error import Estimate, student_t_95
from loka.train import quality
from loka.validation import PairedDifference, across_pairs, paired_difference, verdict


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

    return (100 * (loss(b) / loss(a) - 1), auc(b) - auc(a), float((chance(b) - chance(a)).sum() / p.sum()))


def test_intervals_cover_the_truth_as_often_as_they_say():
    truth = true_differences()
    simulations = 300
    covered = np.zeros(3)
    for seed in range(simulations):
        rng = np.random.default_rng(seed)
        true, a, b = world(rng, 600)
        labels = rng.random(600) < chance(true)
        pair = paired_difference(a, b, labels)
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
    pair = paired_difference(a, b, labels)
    assert pair.ne_percent.value == pytest.approx(100 * (after.ne - before.ne) / before.ne, rel=1e-9)
    assert pair.auc.value == pytest.approx(after.auc - before.auc, abs=1e-14)
    assert pair.calibration.value == pytest.approx(after.calibration - before.calibration, abs=1e-12)
    assert pair.rows == 2000


def test_identical_predictions_differ_by_exactly_zero():
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=500), rng.integers(0, 2, 500)
    pair = paired_difference(logits, logits, labels)
    zero = Estimate(0.0, 0.0, 0.0)
    assert (pair.ne_percent, pair.auc, pair.calibration) == (zero, zero, zero)
    assert pair.verdict == "pass"


def beats(logits, labels):
    """[clicks, others]: 1 where the click outranks the other row, 1/2 where they tie."""
    scores, others = logits[labels][:, None], logits[~labels][None]
    return (scores > others) + 0.5 * (scores == others)


def half_width(estimate):
    return (estimate.high - estimate.low) / 2


def test_intervals_are_those_of_resampled_rows():
    rng = np.random.default_rng(0)
    true, a, b = world(rng, 1500)
    labels = rng.random(1500) < chance(true)
    a, b = a.round(1), b.round(1)  # ties
    pair, far = paired_difference(a, b, labels), paired_difference(a, 3 * a, labels)
    pairs, gap = beats(b, labels) - beats(a, labels), chance(b) - chance(a)
    weights = rng.multinomial(1500, np.full(1500, 1 / 1500), size=2000).astype(float)
    clicks, others = weights[:, labels], weights[:, ~labels]
    counted = ((clicks @ pairs) * others).sum(1)
    auc = counted / (clicks.sum(1) * others.sum(1))
    calibration = weights @ gap / clicks.sum(1)
    signed = np.where(labels, -a, a)
    ne = 100 * (weights @ np.logaddexp(0, 3 * signed) / (weights @ np.logaddexp(0, signed)) - 1)
    for estimate, resampled in ((pair.auc, auc), (pair.calibration, calibration), (far.ne_percent, ne)):
        # The deviation of 2000 normal samples is itself known to 1 / sqrt(4000) = 1.6 %: three of these.
        # What two rows have in common beyond the means of either, which resampling sees a little more
        # of (it vanishes as 1 / N), is 0.7 % of the AUC's variance here.
        assert half_width(estimate) == pytest.approx(1.96 * resampled.std(ddof=1), rel=0.05)
        # Nor does the middle move: the mean of as many samples lies within 4 of its own deviations.
        assert abs(resampled.mean() - estimate.value) < 4 * resampled.std() / 2000**0.5


# Few distinct values, so that most examples hold ties, within a model and across classes.
few = st.lists(st.tuples(st.integers(-2, 2), st.integers(-2, 2), st.booleans()), min_size=4, max_size=30).filter(
    lambda rows: 2 <= sum(clicked for *_, clicked in rows) <= len(rows) - 2
)


@settings(max_examples=150)
@given(few)
def test_auc_with_ties_is_that_of_all_pairs_and_swapping_flips_signs(rows):
    a, b, labels = (np.array(column) for column in zip(*rows, strict=True))
    pair, swapped = paired_difference(a, b, labels), paired_difference(b, a, labels)
    pairs = beats(b, labels) - beats(a, labels)
    clicks, others = pairs.shape
    variance = pairs.mean(1).var(ddof=1) / clicks + pairs.mean(0).var(ddof=1) / others
    assert pair.auc.value == pytest.approx(pairs.mean(), abs=1e-14)
    half = student_t_95(min(pairs.shape) - 1) * np.sqrt(variance)
    assert half_width(pair.auc) == pytest.approx(half, abs=1e-12)
    for one, other in ((pair.auc, swapped.auc), (pair.calibration, swapped.calibration)):
        assert (one.value, one.low, one.high) == (-other.value, -other.high, -other.low)


def test_models_that_rank_nothing_or_alike_do_not_differ_in_auc():
    rng = np.random.default_rng(0)
    labels = rng.random(100) < 0.3
    logits = rng.normal(size=100)
    zero = Estimate(0.0, 0.0, 0.0)
    assert paired_difference(np.zeros(100), np.ones(100), labels).auc == zero
    assert paired_difference(logits, 2 * logits - 1, labels).auc == zero  # the same order
    against = paired_difference(np.zeros(100), logits, labels).auc
    assert against.value == pytest.approx(quality(logits, labels).auc - 0.5, abs=1e-15)
    assert against.low < against.value < against.high


def test_one_click_has_no_spread_to_estimate():
    auc = paired_difference([0.0, 1.0, 2.0], [2.0, 1.0, 0.0], [1, 0, 0]).auc
    assert (auc.value, auc.low, auc.high) == (1.0, -np.inf, np.inf)


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


def test_kl_is_what_labels_of_the_first_model_would_lose():
    rng = np.random.default_rng(0)
    a, labels = rng.normal(-1.5, 1.0, 4000), rng.random(4000) < 0.5
    b = 3 * a  # so far that KL is another the other way round
    p, q = chance(a), chance(b)
    kl = (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).mean()
    found = paired_difference(a, b, labels).kl_percent
    assert found.value == pytest.approx(100 * kl / np.logaddexp(0, np.where(labels, -a, a)).mean())
    assert found.low < found.value < found.high
    assert paired_difference(a, a, labels).kl_percent.value == 0


def test_one_class_is_refused():
    with pytest.raises(ValueError, match="both classes"):
        paired_difference([0.0, 1.0], [0.0, 1.0], [0, 0])
