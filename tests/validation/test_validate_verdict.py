import math

import numpy as np
import pytest

from loka.core.error import student_t_95
from loka.validation.quantile import student_t, two_sided_tail
from loka.validation.variance import MIN_PAIRS, PairVariance, pair_variances
from loka.validation.verdicts import ERROR, RowsVerdict, joined

LIMIT = 0.02


def test_quantiles_are_those_of_the_tables():
    for freedom in (1, 2, 3, 4, 7, 12, 30):
        assert student_t(freedom, 0.05) == pytest.approx(student_t_95(freedom), abs=6e-5)
    # Two-sided 0.1 %: Fisher and Yates' table.
    for freedom, t in ((1, 636.62), (3, 12.924), (10, 4.587), (120, 3.373)):
        assert student_t(freedom, 0.001) == pytest.approx(t, rel=1e-3)
    assert student_t(0, 0.05) == math.inf


def test_the_expansion_meets_the_exact_sums():
    for tail in (0.05, 0.05 / 64):
        assert student_t(200, tail) == pytest.approx(student_t(201, tail), rel=1e-3)
        assert two_sided_tail(student_t(201, tail), 201) == pytest.approx(tail, rel=1e-3)


def pairs_of_losses(rng, pairs, rows, effect, *, seed_sd=0.004, row_sd=0.6, rest_sd=1.0, groups=None):
    """Losses with a mean relative difference of `effect` percent (a number, or one per group): noise of
    seeds (in percent), of rows that all pairs share, and of single rows in single pairs."""
    base = rng.gamma(2.0, 0.25, rows)
    effect = np.asarray(effect, float)
    true = effect[groups] if groups is not None else effect
    shared = row_sd / 100 * rng.normal(size=rows)
    for _ in range(pairs):
        moved = (true + seed_sd * rng.normal()) / 100
        rest = rest_sd / 100 * rng.normal(size=rows)
        control = base * (1 + 0.02 * rng.normal(size=rows))
        yield control, control * (1 + moved + shared + rest)


def variance_of(**given):
    return PairVariance(**{"mean": 0.0, "pairs": 4, "rows": 1000, "between_pairs": 0.0, "rows_error": 0.0, **given})


def covers(interval, truth=0.05):
    return interval.low <= truth <= interval.high


def judged(variance, *, limit=LIMIT, tail=ERROR, name="all rows"):
    return RowsVerdict(name=name, variance=variance, clicks=variance.rows // 3, limit=limit, tail=tail)


@pytest.mark.parametrize(
    ("seed_sd", "row_sd", "rest_sd"),
    [(0.02, 0.0, 1.0), (0.0, 2.0, 0.5), (0.01, 0.8, 0.8), (0.0, 0.0, 1.0)],
    ids=["seeds", "rows", "both", "neither"],
)
def test_the_interval_covers_the_truth_whatever_the_noise_is_made_of(seed_sd, row_sd, rest_sd):
    rng = np.random.default_rng(1)
    simulations, rows, groups = 400, 1500, np.zeros(1500, np.int64)
    covered = over_seeds = 0
    wider = []
    for _ in range(simulations):
        losses = pairs_of_losses(rng, 4, rows, 0.05, seed_sd=seed_sd, row_sd=row_sd, rest_sd=rest_sd)
        (variance,) = pair_variances(losses, groups, 1)
        covered += covers(variance.interval(ERROR))
        blind = variance.over_seeds(ERROR)
        over_seeds += covers(blind)
        wider.append(variance.half_width(ERROR) / (blind.high - blind.low) * 2)
    # 95 % over 400 simulations has a standard deviation of 1.1 %: three of them below.
    assert covered / simulations >= 0.917
    if row_sd == 2.0:  # what an interval over pairs alone makes of noise that all pairs share
        assert over_seeds / simulations < 0.5
    if row_sd == 0.0:  # nothing is common to the pairs: what rows add is in that of pairs already
        assert np.median(wider) < 1.05


def test_an_effect_at_the_limit_passes_at_most_one_time_in_twenty():
    rng = np.random.default_rng(2)
    groups = np.zeros(1500, np.int64)
    passes = fails = clean = 0
    simulations = 400
    for _ in range(simulations):
        noise = {"seed_sd": 0.006, "row_sd": 0.05, "rest_sd": 0.3}
        (at,) = pair_variances(pairs_of_losses(rng, 5, 1500, LIMIT, **noise), groups, 1)
        (none,) = pair_variances(pairs_of_losses(rng, 5, 1500, 0.0, **noise), groups, 1)
        passes += judged(at).verdict == "pass"
        fails += judged(at).verdict == "fail"
        clean += judged(none).verdict == "pass"
    assert passes / simulations <= 0.05
    assert fails / simulations <= 0.05  # it does not exceed the limit either
    assert clean / simulations > 0.6  # and yet no effect at all passes most of the time


def test_a_bad_segment_hides_in_a_good_average_and_is_found():
    rng = np.random.default_rng(3)
    rows = 60_000
    groups = rng.choice(5, rows, p=[0.04, 0.24, 0.24, 0.24, 0.24]).astype(np.int64)
    effect = [0.25, -0.004, -0.003, 0.0, 0.0]  # the mean over rows is 0.008 %
    losses = list(pairs_of_losses(rng, 6, rows, effect, seed_sd=0.001, row_sd=0.1, rest_sd=0.3, groups=groups))
    average = judged(pair_variances(losses, np.zeros(rows, np.int64), 1)[0])
    segments = tuple(
        judged(variance, tail=ERROR / 5, name=str(place))
        for place, variance in enumerate(pair_variances(losses, groups, 5))
    )
    assert average.verdict == "pass"
    assert [segment.verdict for segment in segments] == ["fail", "pass", "pass", "pass", "pass"]
    assert joined(each.verdict for each in (average, *segments)) == "fail"
    assert joined(each.verdict for each in (average, *segments[1:])) == "pass"


def test_segments_hold_together_as_often_as_they_say():
    rng = np.random.default_rng(4)
    rows, count, simulations = 2000, 8, 250
    groups = rng.integers(0, count, rows)
    together = 0
    for _ in range(simulations):
        losses = pairs_of_losses(rng, 4, rows, 0.0, seed_sd=0.01, row_sd=0.5, rest_sd=0.5)
        together += all(covers(v.interval(ERROR / count), 0) for v in pair_variances(losses, groups, count))
    assert together / simulations >= 0.91  # 95 % less three standard deviations of 1.4 %


def test_pair_variances_are_the_means_of_the_pairs_own_differences():
    rng = np.random.default_rng(5)
    losses = list(pairs_of_losses(rng, 3, 999, 0.1))
    groups = rng.integers(0, 3, 999)
    for group, variance in enumerate(pair_variances(losses, groups, 3)):
        inside = groups == group
        ratios = [100 * ((b - a)[inside].mean() / a[inside].mean()) for a, b in losses]
        assert variance.mean == pytest.approx(np.mean(ratios), rel=1e-12)
        assert variance.between_pairs == pytest.approx(np.std(ratios, ddof=1), rel=1e-12)
        assert variance.rows == inside.sum()
    # The error over few rows of one pair is that of a ratio of means; a cluster is a row that is their sum.
    a, b = (part[:9] for part in losses[0])
    for clusters, draws in ((None, 9), (np.arange(9) // 3, 3)):
        (one,) = pair_variances([(a, b)], np.zeros(9, np.int64), 1, clusters=clusters)
        residual = (b - b.sum() / a.sum() * a).reshape(draws, -1).sum(axis=1) * draws / a.sum()
        assert one.rows_error == pytest.approx(100 * residual.std(ddof=1) / draws**0.5)


@pytest.mark.parametrize(("mean", "between"), [(0.004, 0.02), (-0.011, 0.05), (0.0, 0.2)])
def test_pairs_needed_is_the_smallest_number_that_decides(mean, between):
    variance = variance_of(mean=mean, pairs=5, rows=10**6, between_pairs=between, rows_error=0.0005)
    needed = judged(variance).pairs_needed
    margin = LIMIT - abs(mean)

    def half(pairs):
        t = student_t(pairs - 1, ERROR)
        return math.hypot(t * between / math.sqrt(pairs), 1.96 * 0.0005)

    assert needed >= MIN_PAIRS
    assert half(needed) <= margin
    assert needed == MIN_PAIRS or half(needed - 1) > margin
    assert f"a pass: {needed - 5} more pair" in judged(variance).outlook


def test_what_no_number_of_pairs_decides_is_said():
    beyond = variance_of(mean=0.021, rows=10**6, between_pairs=0.01)
    told = judged(beyond).outlook
    assert "a pass is not attainable at this mean (were it 0: 1 more pair)" in told
    fail = beyond.pairs_to(0.001, ERROR)
    assert f"a fail: {fail - 4} more pairs" in told
    few_rows = variance_of(rows_error=0.05)
    assert few_rows.pairs_to(LIMIT, ERROR) is None
    told = judged(few_rows).outlook
    assert "no number of pairs" in told
    rows = int(told.rpartition("about ")[2].split()[0])
    grown = variance_of(rows=rows, rows_error=0.05 * math.sqrt(1000 / rows))
    assert judged(grown).verdict == "pass"


def test_too_little_to_judge_is_undecided_and_says_why():
    clear = variance_of(between_pairs=1e-9, rows_error=1e-9)
    assert judged(clear).verdict == "pass"
    three = variance_of(pairs=3, between_pairs=1e-9, rows_error=1e-9)
    assert judged(three).verdict == "undecided"
    assert "1 more pair" in judged(three).outlook
    for clicks in (3, clear.rows - 3):
        few = RowsVerdict(name="s", variance=clear, clicks=clicks, limit=LIMIT, tail=ERROR)
        assert few.verdict == "undecided"
        assert f"{clicks} clicks and {clear.rows - clicks} others" in few.outlook
    one = variance_of(pairs=1, between_pairs=math.nan)
    assert judged(one).verdict == "undecided"
    empty = pair_variances([(np.ones(5), np.ones(5))] * 4, np.zeros(5, np.int64), 2)[1]
    assert RowsVerdict(name="none", variance=empty, clicks=0, limit=1, tail=0.05).verdict == "undecided"


def test_a_margin_that_no_number_of_rows_reaches_is_undecided():
    at_the_limit = variance_of(mean=1e-300, rows_error=1.0)
    found = judged(at_the_limit, limit=2e-300)
    assert at_the_limit.rows_to(1e-300, ERROR) is None
    assert found.verdict == "undecided"
    assert "more than" in found.outlook


def test_rows_that_come_together_count_as_one_draw():
    """Noise of users in rows of users: intervals over single rows miss the truth, over users they hold it."""
    rng = np.random.default_rng(3)
    users, each, simulations = 120, 12, 300
    user = np.repeat(np.arange(users) * 7 + 3, each)  # ids are no places
    rows, alone, together = users * each, 0, 0
    for _ in range(simulations):
        base = rng.gamma(2.0, 0.25, rows)
        moved = 1 + (0.05 + 2.0 * np.repeat(rng.normal(size=users), each)) / 100
        losses = [(base, base * moved * (1 + 0.002 * rng.normal(size=rows))) for _ in range(4)]
        for clusters in (None, user):
            (variance,) = pair_variances(losses, np.zeros(rows, np.int64), 1, clusters=clusters)
            held = covers(variance.interval(ERROR))
            if clusters is None:
                alone += held
            else:
                assert (variance.rows, variance.clusters, variance.effective_clusters) == (rows, users, users)
                together += held
    # 95 % over 300 simulations has a standard deviation of 1.3 %: three of them below.
    assert together / simulations >= 0.912
    assert alone / simulations < 0.6


def test_a_cluster_of_half_the_rows_is_nearly_alone():
    """200 users and one that has as many rows: what t of 200 degrees would cover two times in three."""
    rng = np.random.default_rng(6)
    user = np.concatenate([np.zeros(1000, np.int64), np.repeat(np.arange(1, 201), 5)])
    rows, held, simulations = len(user), 0, 300
    for _ in range(simulations):
        base = rng.gamma(2.0, 0.25, rows)
        moved = 1 + (0.05 + 2.0 * rng.normal(size=201)[user]) / 100
        losses = [(base, base * moved * (1 + 0.002 * rng.normal(size=rows))) for _ in range(4)]
        (variance,) = pair_variances(losses, np.zeros(rows, np.int64), 1, clusters=user)
        assert (variance.clusters, variance.effective_clusters) == (201, 3)
        held += covers(variance.interval(ERROR))
    assert held / simulations > 0.85  # its own residual is small because it pulls the mean: not 95 %


def test_clusters_of_one_row_are_rows():
    rng = np.random.default_rng(4)
    losses, groups = list(pairs_of_losses(rng, 3, 300, 0.1)), rng.integers(0, 3, 300)
    plain = pair_variances(losses, groups, 3)
    for each, one in zip(pair_variances(losses, groups, 3, clusters=rng.permutation(300)), plain, strict=True):
        assert each.rows_error == pytest.approx(one.rows_error, rel=1e-9)
        assert each.clusters == one.rows
    copies = pair_variances(np.repeat(losses, 2, 2), groups.repeat(2), 3, clusters=np.arange(300).repeat(2))
    assert [each.by_rows for each in copies] == pytest.approx([one.by_rows for one in plain])
