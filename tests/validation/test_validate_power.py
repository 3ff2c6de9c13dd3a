"""What is said of power before and after, and a bank of pairs to say it by."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_run import RandomRows, SmallModel

from loka.core.exceptions import FileRefused, LokaError
from loka.train import TrainConfig
from loka.validation import paired_difference
from loka.validation.arms import ArmSpec, arm_named, by_recipe, nudged
from loka.validation.pair_bank import Bank, BankedArm, BankedPair, deposit, prior_of, resample
from loka.validation.power import POWER, contributions, deviation_by_rows, forecast, rates
from loka.validation.record import ArmVerdict, SeedPair, Validation
from loka.validation.validate import validate
from loka.validation.variance import MIN_PAIRS, PairVariance
from loka.validation.verdicts import ERROR, RowsVerdict

CONFIG = TrainConfig(batch_size=64, seed=3, lr=1e-2, average="tail")
TRAIN, TEST = RandomRows(640), RandomRows(600, seed=8)
SAME = ArmSpec(name="same", apply=lambda model: model, identity={"what": "nothing"})
LIMIT = 0.02


def prior(between: float, rows_error: float = 0.0, rows: int = 10**6) -> PairVariance:
    return PairVariance(mean=0.0, pairs=8, rows=rows, between_pairs=between, rows_error=rows_error)


@pytest.mark.parametrize("between", [0.01, 0.025, 0.06])
def test_the_pairs_that_are_said_to_be_needed_do_it(between: float) -> None:
    said = forecast(prior(between), pairs=4, limit=LIMIT, held_out=10**6)
    rng = np.random.default_rng(5)
    for pairs, enough in ((said.pairs, True), (said.pairs * 3 // 4, False)):
        values = between * rng.normal(size=(4000, pairs))
        share = rates(values, rows_error=0.0, limit=LIMIT).passed
        # 80 % over 4000 validations has a standard deviation of 0.6 %, here and in what was said.
        assert (share > POWER - 0.03) == enough


def test_more_scatter_needs_more_pairs_and_more_rows() -> None:
    pairs = [forecast(prior(s), pairs=4, limit=LIMIT, held_out=10**6).pairs for s in (0.01, 0.02, 0.04)]
    assert pairs == sorted(pairs)
    assert pairs[0] < pairs[-1]
    assert forecast(prior(0.385), pairs=4, limit=LIMIT, held_out=10**6).pairs is None
    few = forecast(prior(0.01, rows_error=0.02, rows=10**5), pairs=4, limit=LIMIT, held_out=10**5)
    # Rows leave half of limit^2 where 1.96 rows_error sqrt(10^5 / N) = limit / sqrt(2).
    assert few.rows == pytest.approx(2 * 10**5 * (1.96 * 0.02 / LIMIT) ** 2, rel=1e-3)
    assert "FEWER are there (100000)" in str(few)
    many = forecast(prior(0.01, rows_error=0.02, rows=10**5), pairs=4, limit=LIMIT, held_out=10**7)
    assert "enough are there" in str(many)
    assert many.pairs is not None
    assert forecast(prior(0.01, rows_error=float("nan")), pairs=4, limit=LIMIT, held_out=10).rows is None


@pytest.mark.parametrize("sequential", [False, True])
def test_verdicts_at_the_limit_are_as_seldom_as_promised(sequential: bool) -> None:
    """Rows' error included, which all pairs of a validation share."""
    rng = np.random.default_rng(1)
    shift = 0.004 * rng.normal(size=(20_000, 1))
    values = LIMIT + 0.01 * rng.normal(size=(20_000, 8)) + shift
    found = rates(values, rows_error=0.004, limit=LIMIT, sequential=sequential)
    # 2.5 % over 20,000 has a standard deviation of 0.11 %: three of them above.
    assert found.passed <= 0.025 + 0.0033
    assert found.failed <= 0.025 + 0.0033
    assert found.pairs < 8 if sequential else found.pairs == 8


def banked(values: list[float], name: str = "naive", rows_error: float = 0.0) -> BankedArm:
    return BankedArm(
        world="w",
        key=name,
        name=name,
        model="dlrm",
        rows=10**6,
        rows_error=rows_error,
        by_rows=0.0,
        pairs=tuple(BankedPair(seed, value) for seed, value in enumerate(values)),
    )


def test_resampling_a_bank_gives_the_rates_of_its_world() -> None:
    """Forty pairs of a known variance: nothing wrong passes, harm is found, as for fresh pairs."""
    rng = np.random.default_rng(2)
    arm = banked((0.3 + 0.01 * rng.normal(size=40)).tolist())  # its own mean is no matter
    fresh = rates(0.01 * rng.normal(size=(4000, 6)), rows_error=0.0, limit=LIMIT)
    # The standard deviation of 40 pairs is known to 11 %, and passing moves by about as much.
    assert resample(arm, pairs=6, limit=LIMIT).passed == pytest.approx(fresh.passed, abs=0.12)
    assert resample(arm, pairs=6, limit=LIMIT, effect=0.05).failed > 0.95
    assert resample(arm, pairs=6, limit=LIMIT, effect=LIMIT).passed < 0.05
    assert resample(arm, pairs=6, limit=LIMIT, effect=0.05, sequential=True).pairs < 6


def test_an_a_a_bank_contains_zero_as_often_as_it_says() -> None:
    rng = np.random.default_rng(3)
    found = resample(banked((0.02 * rng.normal(size=60)).tolist(), name="nudged"), pairs=4, limit=LIMIT)
    assert 0.92 <= found.contains_zero <= 0.98
    assert found.failed <= 0.025 + 0.01  # drawn from sixty pairs with random signs


@settings(max_examples=30)
@given(values=st.lists(st.lists(st.floats(-1, 1), min_size=1), max_size=4))
def test_a_bank_is_read_back_as_it_was(values, tmp_path_factory) -> None:
    bank = Bank(tuple(banked(pairs, name=str(i)) for i, pairs in enumerate(values)))
    file = tmp_path_factory.mktemp("bank") / "bank.json"
    bank.save(file)
    written = file.read_bytes()
    assert Bank.load(file) == bank
    Bank.load(file).save(file)
    assert file.read_bytes() == written


def test_a_damaged_bank_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "bank.json"
    Bank((banked([0.1, 0.2]),)).save(file)
    file.write_text(file.read_text().replace("0.2", "0.3"))
    with pytest.raises(FileRefused, match="checksum"):
        Bank.load(file)


def run(out: Path, arms=(SAME,), **others) -> Validation:
    return validate(SmallModel, TRAIN, TEST, arms, **{"config": CONFIG, "out": out, "pairs": 4, **others})


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Validation:
    return run(tmp_path_factory.mktemp("power"), (nudged(), by_recipe("naive", rows=64)))


def test_a_bank_takes_the_pairs_and_tells_other_settings_apart(found: Validation, tmp_path: Path) -> None:
    first, whole = deposit(Bank(), run(tmp_path, (nudged(),), pairs=2)), deposit(Bank(), found)
    grown = deposit(first, found)
    assert grown == replace(grown, arms=grown.arms)
    assert [arm.name for arm in grown.arms] == ["nudged", "naive"]
    assert grown.arms == whole.arms  # the same seeds gave the same pairs, and the key is the same
    for arm, judged in zip(grown.arms, found.arms, strict=True):
        assert arm.values == [pair.difference.ne_percent.value for pair in judged.pairs]
    other = run(tmp_path / "other", (nudged(),), pairs=2, config=replace(CONFIG, schedule="constant"))
    both = deposit(grown, other)
    assert len(both.arms) == 3
    assert {arm.world for arm in both.of(found.world)} == {found.world}
    assert prior_of(both, found.world, ("naive",)).name == "naive"
    assert prior_of(both, found.world, ("plan",)).name == "naive"  # no such arm: the widest but A/A's
    assert prior_of(both, other.world, ("plan",)).name == "nudged"
    assert prior_of(both, "elsewhere", ("naive",)) is None


def test_more_rows_reduce_the_part_that_rows_make() -> None:
    """Two models that differ on every row by chance alone, no seed better than another."""
    rng, rows, differences = np.random.default_rng(4), 1000, []
    for _ in range(800):
        z = rng.normal(-1, 1, rows)
        labels = (rng.random(rows) < 1 / (1 + np.exp(-z))).astype(np.float32)
        differences.append(paired_difference(z, z + 0.1 * rng.normal(size=rows), labels))
    pairs = tuple(SeedPair(seed=seed, difference=found) for seed, found in enumerate(differences))
    between = float(np.std([found.ne_percent.value for found in differences], ddof=1))
    variance = PairVariance(mean=0.0, pairs=800, rows=rows, between_pairs=between, rows_error=0.0)
    judged = RowsVerdict(name="all rows", variance=variance, clicks=300, limit=LIMIT, tail=ERROR)
    by_rows = deviation_by_rows(ArmVerdict(name="a", pairs=pairs, average=judged))
    # A standard deviation of 800 values is known to 2.5 %: three times that.
    assert by_rows == pytest.approx(between, rel=0.075)
    same = forecast(variance, pairs=4, limit=LIMIT, held_out=rows, by_rows=by_rows)
    assert same.between == pytest.approx(max(between, by_rows))
    more = forecast(variance, pairs=4, limit=LIMIT, held_out=4 * rows, by_rows=by_rows)
    # Half of it, and of the 7.5 % too many in `between`, which would be training's, the whole.
    assert 0.46 < more.between / between < np.sqrt(0.25 + 1.075**2 - 1)


def test_what_each_pair_contributed(found: Validation) -> None:
    arm = found.arms[1]
    parts = contributions(arm)
    values = [part.value for part in parts]
    assert [part.seed for part in parts] == [3, 4, 5, 6]
    last, whole = parts[-1].after, arm.average.ne_percent
    assert (last.low, last.high) == pytest.approx((whole.low, whole.high), rel=1e-9)
    for place, part in enumerate(parts):
        assert part.without.value == pytest.approx(np.mean(values[:place] + values[place + 1 :]))
        assert part.after.value == pytest.approx(np.mean(values[: place + 1]))
    # Without the pair farthest from the others the interval is the narrowest.
    far = int(np.argmax(np.abs(np.array(values) - np.median(values))))
    widths = [part.without.high - part.without.low for part in parts]
    assert widths[far] == min(widths)


def test_a_nudged_control_is_an_a_a_arm(found: Validation) -> None:
    a_a, naive = found.arms
    assert a_a.key != naive.key
    model, again = SmallModel(), SmallModel()
    again.load_state_dict(model.state_dict())
    state = torch.get_rng_state()
    arm_named("nudged", rows=64).apply(again)
    assert torch.equal(torch.get_rng_state(), state)
    for weight, other in zip(model.parameters(), again.parameters(), strict=True):
        moved = ((other - weight).abs() / weight.abs().clamp_min(1e-12)).max()
        assert 0 < moved < 1e-3


def test_arms_draw_the_same_random_numbers(tmp_path: Path) -> None:
    """The model has dropout: FP8 must not shift whose activations are dropped, or pairs share nothing."""
    masks: dict[str, list[torch.Tensor]] = {}

    def watched(arm: ArmSpec) -> ArmSpec:
        def apply(model: SmallModel) -> None:
            arm.apply(model)
            kept = masks.setdefault(arm.name, [])

            def note(module, args, output) -> None:
                # ReLU's zeros are dropped or not; where the input is positive the mask shows.
                kept.append(torch.where(args[0] > 0, (output == 0).float(), torch.nan).detach())

            model.mlp[2].register_forward_hook(note)

        return replace(arm, apply=apply)

    run(tmp_path, [watched(SAME), watched(by_recipe("naive", rows=64))], pairs=1)
    steps = list(zip(masks["same"], masks["naive"], strict=True))[:10]
    assert len(steps) == 10
    dropped = 0.0
    for one, other in steps:
        seen = ~(one.isnan() | other.isnan())
        assert seen.double().mean() > 0.2
        assert torch.equal(one[seen], other[seen])
        dropped += float(one[seen].sum())
    assert dropped > 0


def test_a_sequential_validation_stops_and_is_not_mixed_with_others(tmp_path: Path) -> None:
    seen = []
    found = run(tmp_path, pairs=8, sequential=True, on_pair=lambda so_far: seen.append(len(so_far.seeds)))
    assert seen == [1, 2, 3, 4]  # no change at all is decided at the first look
    assert (found.verdict, found.planned) == ("pass", 8)
    assert found.arms[0].average.tail < ERROR
    assert Validation.load(tmp_path / "validation.json").planned == 8
    again = run(tmp_path, pairs=8, sequential=True)
    assert len(again.seeds) == 4
    for others in ({"pairs": 9, "sequential": True}, {"pairs": 8}):
        with pytest.raises(LokaError, match="decided by a look after every pair, 8 at most"):
            run(tmp_path, **others)
    run(tmp_path / "b", pairs=4)
    run(tmp_path / "b", pairs=5)  # one look may grow, as the page warns
    with pytest.raises(LokaError, match="decided by one look"):
        run(tmp_path / "b", pairs=8, sequential=True)
    with pytest.raises(ValueError, match=f"looks begin after {MIN_PAIRS}"):
        run(tmp_path / "c", pairs=3, sequential=True)
