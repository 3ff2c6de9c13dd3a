import json
import math
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loka.core.error import student_t_95
from loka.core.numerics.effect import Effect, joint_loss, merged
from loka.core.storage.codec import decode, encode


def drawn(count, *, cv, generator):
    """Log-normal terms of mean 1 and this coefficient of variation: heavy as real ones."""
    sigma = math.sqrt(math.log1p(cv**2))
    return (torch.randn(count, generator=generator, dtype=torch.float64) * sigma - sigma**2 / 2).exp().tolist()


def test_ne_is_the_mean_term_over_the_entropy():
    effect = Effect.of([1e-4, 3e-4], [[0.1], [0.3]])
    entropy = -0.2 * math.log(0.2) - 0.8 * math.log(0.8)
    assert effect.entropy == pytest.approx(entropy)
    assert effect.kl().value == pytest.approx(2e-4 / entropy)
    assert effect.loss().value == pytest.approx(2e-4)


def test_tasks_add_their_entropies():
    effect = Effect.of([1.0], [[0.5, 0.5]])
    assert effect.entropy == pytest.approx(2 * math.log(2))


@pytest.mark.parametrize(("cv", "least"), [(1.0, 0.91), (3.0, 0.90)])
def test_the_interval_covers_the_mean_of_heavy_terms(cv, least):
    """95 % nominal. Of 1,536 log-normal terms it covers 95.2 % (CV 1) and 93.7 % (CV 3), counted over 600
    draws, and `least` is three standard errors of 400 below that. One sigma either way covers 68 %."""
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for _ in range(400):
        found = Effect.of(drawn(1536, cv=cv, generator=generator), [[0.2]] * 1536).loss()
        hits += found.low <= 1 <= found.high
    assert hits >= 400 * least


def test_the_upper_end_reckons_with_rows_that_were_not_drawn():
    """Of 512 terms with CV 5 the logarithm's upper end lies below the mean in 12.2 % of 600 draws, and this
    one in 8.3 %; they are the same draws, so 300 tell the two apart."""
    generator = torch.Generator().manual_seed(3)
    below, before = 0, 0
    for _ in range(300):
        found = Effect.of(drawn(512, cv=5.0, generator=generator), [[0.2]] * 512)
        without = replace(found, cubes=0.0).loss()  # as records of before
        assert found.loss().high >= without.high
        assert found.loss().low == without.low
        below += found.loss().high < 1
        before += without.high < 1
    assert below <= 0.8 * before


def test_the_upper_end_is_halls():
    """The transformed Student statistic at the upper end is -t: g(T) = ((1 + a T / 3)^3 - 1) / a + a / 6."""
    terms = drawn(1536, cv=3.0, generator=torch.Generator().manual_seed(5))
    found = Effect.of(terms, [[0.2]] * 1536)
    values = torch.tensor(terms, dtype=torch.float64)
    deviations = values - values.mean()
    skewness = (deviations**3).mean() / (deviations**2).mean() ** 1.5
    assert found.skewness == pytest.approx(skewness.item())
    a = skewness / 1536**0.5
    student = (values.mean() - found.loss().high) / (values.std() / 1536**0.5)
    transformed = ((1 + a * student / 3) ** 3 - 1) / a + a / 6
    assert transformed.item() == pytest.approx(-student_t_95(1535), rel=1e-6)


def test_the_interval_narrows_with_samples_and_stays_positive():
    terms = drawn(4096, cv=3.0, generator=torch.Generator().manual_seed(1))
    wide = Effect.of(terms[:64], [[0.2]] * 64).kl()
    narrow = Effect.of(terms, [[0.2]] * 4096).kl()
    assert 0 < wide.low < wide.value < wide.high
    assert narrow.high / narrow.low < (wide.high / wide.low) ** 0.5
    alone = Effect.of([1.0], [[0.2]]).kl()
    assert (alone.low, alone.high) == (0, math.inf)


def test_merging_equals_one_go():
    terms = drawn(100, cv=2.0, generator=torch.Generator().manual_seed(2))
    rows = [[0.1 + 0.001 * i, 0.5] for i in range(100)]
    whole = Effect.of(terms, rows)
    parts = Effect.of(terms[:30], rows[:30]).merge(Effect.of(terms[30:], rows[30:]))
    assert parts.count == 100
    assert parts.total == pytest.approx(whole.total, rel=1e-14)
    assert parts.kl().high == pytest.approx(whole.kl().high, rel=1e-9)
    empty = Effect.of([], [])
    assert empty.merge(whole) == whole == whole.merge(empty)
    assert merged({"a": whole}, {"a": whole, "b": parts}) == {"a": whole.merge(whole), "b": parts}
    with pytest.raises(ValueError, match="tasks"):
        whole.merge(Effect.of([1.0], [[0.5]]))


def test_common_shifts_add_before_they_are_squared():
    """Two sites that move every logit by a and b cost 1/2 c (a + b)^2, not 1/2 c (a^2 + b^2)."""
    p, a, b = 0.3, 1e-2, -1e-2
    c = p * (1 - p)

    def moved(by):
        return Effect.of([0.5 * c * by**2] * 5, [[p]] * 5, [[c * by]] * 5, [[c]] * 5)

    assert joint_loss([moved(a), moved(a)]) == pytest.approx(0.5 * c * (2 * a) ** 2)
    assert joint_loss([moved(a), moved(b)]) == pytest.approx(0, abs=1e-18)
    assert joint_loss([moved(a).faded(0.5), moved(a).merge(moved(a))]) == pytest.approx(2 * c * a**2)
    unknown = Effect.of([0.5 * c * a**2] * 5, [[p]] * 5)
    assert joint_loss([moved(a), unknown]) == pytest.approx(c * a**2)


def test_faded_samples_count_less():
    """Weights w: the mean is sum w t / sum w, and its variance that of (sum w)^2 / sum w^2 samples."""
    rows = [[0.2]] * 100
    first, second = ([1.0, 3.0] * 50, [2.0, 6.0] * 50)
    both = Effect.of(first, rows).faded(0.5).merge(Effect.of(second, rows))
    assert both.loss().value == pytest.approx((0.5 * 2 + 4) / 1.5)
    assert both.count == 150
    assert both.samples == pytest.approx(150**2 / 125)
    assert both.entropy == pytest.approx(Effect.of(first, rows).entropy)
    variance = (0.5 * 5 + 20) / 1.5 - both.loss().value ** 2
    half = 1.973 * math.sqrt(variance / (180 - 1)) / both.loss().value
    assert math.log(both.loss().high / both.loss().value) == pytest.approx(half, rel=1e-3)
    unsure = replace(both, log_variance=0.5)
    assert unsure.faded(0.5).log_variance == 0.5
    assert unsure.merge(Effect.of(first, rows)).log_variance == pytest.approx(0.5 * 150 / 250)


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=9), st.floats(0.1, 10))
def test_moments_are_those_of_the_terms_whatever_their_weight(terms, factor):
    """The mean of n terms scatters by their variance over n; over its square, that is of its logarithm."""
    effect = Effect.of(terms, [[0.2]] * len(terms))
    mean = statistics.fmean(terms)
    expected = statistics.variance(terms) / len(terms) / mean**2
    assert effect.sampling_variance == pytest.approx(expected, rel=1e-6, abs=1e-12)
    faded = effect.faded(factor)
    assert faded.samples == pytest.approx(effect.samples)
    assert faded.skewness == pytest.approx(effect.skewness, rel=1e-5, abs=1e-5)  # 2**-53 over 1e-3**3
    assert faded.kl().value == pytest.approx(effect.kl().value)
    known = Effect.of(terms, [[0.2]] * len(terms), [[0.3]] * len(terms), [[0.1]] * len(terms))
    assert known.common() == pytest.approx((3.0,))
    assert known.faded(factor).common() == pytest.approx((3.0,))
    assert known.faded(factor).curvatures == pytest.approx([factor * c for c in known.curvatures])
    assert known.faded(factor).pulls == pytest.approx([factor * pull for pull in known.pulls])
    assert effect.sampling_variance < math.inf == Effect.of(terms[:1], [[0.2]]).sampling_variance


def test_samples_that_are_not_finite_are_left_out():
    effect = Effect.of([1.0, math.nan, math.inf], [[0.5], [0.1], [0.1]])
    assert effect == Effect.of([1.0], [[0.5]])
    shifted = Effect.of([1.0, math.nan], [[0.5], [0.1]], [[0.2], [math.nan]], [[0.25], [math.nan]])
    assert shifted == Effect.of([1.0], [[0.5]], [[0.2]], [[0.25]])
    assert math.isnan(Effect.of([math.nan], [[0.5]]).kl().value)


def test_what_costs_nothing_and_what_cannot_be_said():
    free = Effect.of([0.0, 0.0], [[0.5], [0.5]]).kl()
    assert (free.value, free.low, free.high) == (0, 0, 0)
    one = Effect.of([0.0], [[0.5]]).kl()  # the next sample may cost anything
    assert (one.value, one.low, one.high) == (0, 0, math.inf)
    assert Effect.of([1 / 3] * 9, [[0.5]] * 9).kl().high == math.inf  # copies of a row
    assert math.isnan(Effect.of([1.0, 1.0], [[1.0], [1.0]]).kl().value)  # a certain outcome has no entropy


def test_through_json():
    pairs = [[0.2, 0.1], [0.4, 0.7]]
    effect = Effect.of([1e-7, 2e-3], pairs, [[-1e-4, 0.0], [1e-3, -2e-3]], pairs)
    assert effect.common() == pytest.approx((9e-4 / 0.6, -2e-3 / 0.8))
    assert decode(Effect, json.loads(json.dumps(encode(effect)))) == effect
    for damage in ({"count": -1}, {"total": math.nan}, {"other": 1}, {"probabilities": None}, {"pulls": [0.0]}):
        with pytest.raises(ValueError, match=r"is no effect|has to be|nothing is known"):
            decode(Effect, {**encode(effect), **damage})


def test_a_stored_effect_is_read_and_written_again_with_the_same_bytes():
    """As statistics held it before there was a codec: digests of them go by these bytes."""
    sums = '{"count": 2, "spread": 2, "total": 0.0020001, "squares": 4.00000001e-06, "probabilities": [0.6, 0.8]'
    shifts = '"pulls": [0.0009, -0.002], "curvatures": [0.6, 0.8]'
    for text in (f"{sums}, {shifts}}}", f'{sums}, {shifts}, "log_variance": 0.01, "cubes": 8e-09}}'):
        assert json.dumps(encode(decode(Effect, json.loads(text)))) == text
