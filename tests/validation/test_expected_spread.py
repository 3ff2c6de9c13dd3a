"""The spread between pairs that a verdict expects: what it does to intervals, where it comes from, and how
often verdicts are wrong by it.

`stored/proof_bank.json` are the planned arms of the proof (benchmarks/quality/bank.py reads it in full): four
models, ten million rows to train on, 2.5 million held out, eight pairs each.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_run import RandomRows, SmallModel

from loka.report.validation_table import validation_table
from loka.train import TrainConfig
from loka.validation.arms import by_recipe
from loka.validation.pair_bank import MOST, OTHER, Bank, BankedArm, deposit, expected_of, resample
from loka.validation.quantile import student_t
from loka.validation.record import Validation
from loka.validation.validate import validate
from loka.validation.variance import CONTRADICTION, KL_SHARE, Expected, PairVariance, seeds_half
from loka.validation.verdicts import ERROR

PROOF = Bank.load(Path(__file__).parent / "stored/proof_bank.json")
LIMIT, HARM = 0.02, 0.05
ALONE = Expected(0.0, 0, "")
SPREADS = st.floats(1e-4, 1.0)
PAIRS = st.integers(4, 12)


@given(own=SPREADS, spread=SPREADS, freedom=st.integers(0, 6), pairs=PAIRS)
def test_no_interval_is_narrower_than_what_was_expected_and_none_trusts_a_contradicted_bank(
    own: float, spread: float, freedom: int, pairs: int
) -> None:
    def half(own: float, spread: float, freedom: int) -> float:
        return float(seeds_half(own, pairs, ERROR, spread=spread, freedom=freedom)) * pairs**0.5

    alone = student_t(pairs - 1, ERROR) * own
    found, exact = half(own, spread, freedom), pytest.approx
    assert found >= (1 - 1e-9) * student_t(pairs - 1 + freedom, ERROR) * spread
    assert half(own, spread, 0) >= (1 - 1e-9) * alone
    assert half(own, 0.0, freedom) == exact(alone)
    if own > CONTRADICTION * spread:
        assert found == exact(alone)
    assert half(3 * own, 3 * spread, freedom) == exact(3 * found)


@given(
    values=st.lists(st.floats(-0.1, 0.1), min_size=4, max_size=8),
    shift=st.floats(-1, 1),
    freedom=st.integers(0, 6),
)
def test_a_shift_of_all_pairs_shifts_the_interval(values: list[float], shift: float, freedom: int) -> None:
    def interval(of: np.ndarray) -> np.ndarray:
        variance = PairVariance(
            mean=float(of.mean()),
            pairs=len(of),
            rows=1000,
            between_pairs=float(of.std(ddof=1)),
            rows_error=0.001,
            expected=Expected(0.05, freedom, "pairs of before"),
        )
        return np.array([variance.interval(ERROR).low, variance.interval(ERROR).high])

    given_values = np.array(values)
    np.testing.assert_allclose(interval(given_values + shift), interval(given_values) + shift, atol=1e-9)


def test_more_pairs_narrow_what_more_pairs_are_said_to_narrow() -> None:
    """`pairs_to` searches by halves: the half-width has to fall with the pairs, whatever was expected."""
    for freedom in range(MOST + 1):
        for own in np.linspace(0, 3, 31):
            halves = [seeds_half(own, pairs, ERROR, spread=1.0, freedom=freedom) for pairs in range(4, 60)]
            assert np.all(np.diff(halves) < 0)


def others_of(arm: BankedArm) -> Expected:
    """What the other models of the proof say."""
    others = Bank(tuple(each for each in PROOF.arms if each.world != arm.world))
    found = expected_of(others, world=arm.world, setting=arm.setting, seeds=())
    assert found is not None
    return found


def figures(pairs: int, expected) -> np.ndarray:
    """Of each arm: fails and holds 0 where nothing is wrong, finds a harm of 0.05 %, passes one of 0.02 %."""
    rows = []
    for arm in PROOF.arms:
        nothing, harm, limit = (
            resample(arm, pairs=pairs, limit=LIMIT, effect=effect, expected=expected(arm))
            for effect in (0.0, HARM, LIMIT)
        )
        rows.append((nothing.failed, nothing.contains_zero, harm.failed, limit.passed))
    return np.array(rows).T


@pytest.mark.parametrize("pairs", [4, 8, 12])
def test_verdicts_of_the_proof_are_as_seldom_wrong_as_was_asked(pairs: int) -> None:
    """The bank of the three other models decides on each. A share of 95 % of 4,000 draws is known to 0.35 %,
    in the mean of eight arms to 0.12 %: the upper end, which errs toward undecided, has three of these."""
    failed, holds, found, passed = figures(pairs, others_of)
    assert failed.max() <= 0.05
    assert 0.92 <= holds.mean() <= 0.98 + 3 * 0.0012
    assert holds.min() >= 0.92
    assert found.min() >= 0.80
    assert passed.max() <= 0.05
    # Without a bank by KL/H, in the mean: single arms miss it (docs/validate.md).
    failed, holds, found, passed = figures(pairs, lambda arm: None)
    assert failed.max() <= 0.05
    assert 0.92 <= holds.mean() <= 0.98
    assert found.mean() >= 0.80
    assert passed.mean() <= 0.05
    # Student's t on the pairs alone was not enough.
    _, holds, _, passed = figures(pairs, lambda arm: ALONE)
    assert holds.mean() < 0.92
    assert passed.mean() > 0.05


def test_what_a_bank_expects() -> None:
    of = PROOF.arms[0]
    known = {"world": of.world, "setting": of.setting, "seeds": ()}
    own, *others = (
        float(np.median([arm.variance.between_pairs**2 for arm in PROOF.arms if arm.world == world]))
        for world in dict.fromkeys(arm.world for arm in PROOF.arms)
    )
    whole = expected_of(PROOF, **known)
    assert whole.freedom == MOST
    assert whole.spread == pytest.approx(((7 * own + OTHER * sum(others)) / (7 + 3 * OTHER)) ** 0.5)
    assert whole.source == "32 banked pairs of dcnv2, dlrm, dlrm_dcn, wukong"
    left = expected_of(PROOF, **{**known, "seeds": range(8)})
    assert left.spread == pytest.approx(np.mean(others) ** 0.5), (
        "the seeds to be trained are the same controls"
    )
    assert expected_of(PROOF, **{**known, "seeds": range(4)}).freedom == MOST

    def bank(*arms: BankedArm) -> Bank:
        return Bank(arms)

    two = [arm for arm in PROOF.arms if arm.world in ("dlrm", "dlrm_dcn")]
    assert expected_of(bank(*two), **known).freedom == 2 * OTHER
    assert expected_of(bank(*two[:2]), **known) is None, "one other model does not say how models differ"
    for change in ({"setting": ""}, {"setting": "other rows"}, {"task": "buy"}, {"name": "nudged"}):
        assert expected_of(bank(*(replace(arm, **change) for arm in two)), **known) is None
    few = [replace(arm, pairs=arm.pairs[:3]) for arm in two]
    assert expected_of(bank(*few), **known) is None
    # An arm of an earlier version knows its model alone.
    assert expected_of(bank(replace(of, setting="")), **known).freedom == MOST
    # One arm of three that went wrong does not decide.
    wrong = replace(of, key="naive", pairs=tuple(replace(p, ne_percent=p.seed * 7.0) for p in of.pairs))
    assert expected_of(bank(*PROOF.arms[:2], wrong), **known).spread < 0.02


CONFIG = TrainConfig(batch_size=64, seed=3, lr=1e-2)


def test_a_validation_says_what_spread_it_took_and_keeps_to_it(tmp_path: Path) -> None:
    def run(name: str, seed: int = 3, pairs: int = 4, **others) -> Validation:
        arms = [by_recipe("naive", rows=64)]
        config = replace(CONFIG, seed=seed)
        rows, held_out = RandomRows(320), RandomRows(600, seed=8)
        out = tmp_path / name
        return validate(SmallModel, rows, held_out, arms, config=config, out=out, pairs=pairs, **others)

    first = run("first")
    average = first.arms[0].average
    kl = np.mean([pair.difference.kl_percent.value for pair in first.arms[0].pairs])
    assert average.variance.expected.spread == pytest.approx(KL_SHARE * kl)
    assert "was to be expected by a third of the KL/H between the models of a pair" in validation_table(first)
    bank = deposit(Bank(), first)
    assert [pair.kl_percent for pair in bank.arms[0].pairs] == [
        pair.difference.kl_percent.value for pair in first.arms[0].pairs
    ]
    assert run("first", bank=bank).arms[0].average == average, "it was decided without a bank"
    second = run("second", seed=20, bank=bank)
    found = second.arms[0].average.variance
    assert (found.expected.freedom, found.expected.source) == (3, "4 banked pairs of model")
    assert found.expected.spread == pytest.approx(average.variance.between_pairs)
    assert second.expected == {"": found.expected}
    text = validation_table(second)
    assert f"{found.expected.spread:.3g} % was to be expected by 4 banked pairs of model" in text
    assert Validation.load(tmp_path / "second/validation.json") == second
    assert run("second", seed=20, bank=Bank()).expected == second.expected, "settled with the first pairs"
    assert run("third", bank=bank).expected == {}, "its own seeds say nothing new"
