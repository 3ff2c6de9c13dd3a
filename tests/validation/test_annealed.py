import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_run import RandomRows, SmallModel

from loka.core.error import Estimate
from loka.core.storage.codec import decode, encode
from loka.report.validation_table import validation_table
from loka.train import TrainConfig
from loka.train.metrics import quality
from loka.validation.annealed import GAIN, RATE, Annealed, annealed
from loka.validation.arms import ArmSpec
from loka.validation.paired import paired_difference
from loka.validation.record import Validation
from loka.validation.runs import HeldOut, Run
from loka.validation.validate import BY_MEAN, validate

CONFIG = TrainConfig(batch_size=64, lr=2e-2, precision="fp32", average="tail")
SAME = ArmSpec(name="same", apply=lambda model: model, identity={})


def rows_of(seed, rows, shift):
    rng = np.random.default_rng(seed)
    z = rng.normal(-1, 2, rows)
    labels = rng.random(rows) < 1 / (1 + np.exp(-z))
    moved = z + shift * rng.normal(size=rows)
    return HeldOut(moved.astype(np.float32), labels.astype(np.float32), z.astype(np.float32))


@settings(max_examples=25)
@given(seed=st.integers(0, 99), rows=st.integers(50, 400), shift=st.floats(0, 3))
def test_the_gain_is_that_of_the_mean_in_percent_and_has_two_parts(seed, rows, shift):
    found = rows_of(seed, rows, shift)
    if len(set(found.labels.tolist())) < 2:
        return
    said = annealed(0.0, [found])
    before, after = quality(found.logits, found.labels).ne, quality(found.mean_logits, found.labels).ne
    assert said.gain.value == pytest.approx(100 * (after / before - 1), abs=1e-9)
    assert said.first_order + said.divergence == pytest.approx(said.gain.value, abs=1e-9)
    assert said.divergence >= -1e-9  # a KL
    whole = paired_difference(found.logits, found.mean_logits, found.labels).ne_percent
    # Student's t of 50 rows is 2.5 % above the normal quantile; runs on the same rows are no more rows.
    assert said.gain.high - said.gain.low == pytest.approx(whole.high - whole.low, rel=0.03)
    assert annealed(0.0, [found, found]).gain.high == pytest.approx(said.gain.high)


def test_noise_around_the_mean_costs_its_kl_to_first_order_with_the_other_sign():
    """z = z' + noise: the loss is at its minimum at z', so first = -2 KL and the gain is -KL."""
    said = annealed(0.0, [rows_of(seed, 200_000, 0.2) for seed in range(4)])
    # 800,000 rows: the first-order term has a standard error of about 2 % of itself.
    assert said.first_order == pytest.approx(-2 * said.divergence, rel=0.1)
    assert said.annealed is False


def test_what_a_shift_costs_a_model_that_is_off_the_rate_of_its_labels():
    rng = np.random.default_rng(0)
    z = rng.normal(-2, 1, 400_000)
    y = (rng.random(len(z)) < 1 / (1 + np.exp(-z + 0.2))).astype(float)
    before, shifted = (quality(each, y) for each in (z, z + 0.01))
    runs = (Run(arm="bf16", seed=0, quality=before),)
    done = Validation(model="m", control="bf16", limit=1, segment_limit=1, seeds=(0,), arms=(), runs=runs)
    (said,) = re.findall(r"predicts (.*) % \[.*changes NE by (\S+) % \[(\S+), (\S+)\] of", validation_table(done))
    more, moved, low, high = map(float, said)
    assert more == pytest.approx(100 * (before.calibration - 1), abs=1e-4)
    # Of the change of NE the KL is d^2 p(1 - p) / 2 at most 1.3e-5 a row: 0.004 % of this NE.
    assert moved == pytest.approx(100 * (shifted.ne / before.ne - 1), abs=0.004)
    rest = rng.random((300, 20_000)) < 1 / (1 + np.exp(-z[:20_000]))  # nothing off: labels of other draws
    half = (high - low) / 2 * math.sqrt(len(z) / 20_000)
    off = [0.01 * (1 / (1 + np.exp(-z[:20_000])) - each).mean() / before.logloss * 100 for each in rest]
    assert np.std(off) * 1.96 <= half, "an interval by the rate alone is no narrower than one by each row's p"


@pytest.mark.parametrize(
    ("rate", "gain", "verdict"),
    [
        (1.0, None, False),
        (RATE * 2, Estimate(0.0, -0.01, 0.01), False),
        (RATE, Estimate(0.0, -0.01, 0.01), True),
        (0.0, None, None),
        (0.0, Estimate(0.0, -0.01, 0.01), True),
        (0.0, Estimate(-0.08, -0.4, 0.24), True),
        (0.0, Estimate(-0.5, -0.7, -0.3), False),
        (0.0, Estimate(0.5, 0.3, 0.7), False),
        (0.0, Estimate(-0.5, -2.0, 1.0), None),
    ],
)
def test_the_answers(rate, gain, verdict):
    said = Annealed(final_rate=rate, runs=1, gain=gain, first_order=0.0, divergence=0.0)
    assert said.annealed is verdict
    wanted = {True: "annealed:", False: "NOT annealed", None: "not known"}[verdict]
    assert wanted in str(said)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    train_rows, test_rows = RandomRows(64 * 150), RandomRows(3000, seed=8)
    return {
        schedule: validate(
            SmallModel,
            train_rows,
            test_rows,
            [SAME],
            config=replace(CONFIG, schedule=schedule),
            out=tmp_path_factory.mktemp(schedule),
            pairs=2,
        )
        for schedule in ("cosine", "constant")
    }


@pytest.mark.slow
def test_a_constant_rate_is_told_from_a_decayed_one(runs):
    rest, moving = runs["cosine"].annealed, runs["constant"].annealed
    assert rest.annealed is True
    assert moving.annealed is False
    assert moving.final_rate == 1.0
    # Not by the rate alone: the weights' own movement shows it too.
    assert abs(moving.gain.value) > GAIN > 3 * abs(rest.gain.value)
    assert moving.gain.value < 0
    assert "--schedule cosine" in str(moving)


@pytest.mark.slow
def test_both_read_outs_are_judged_and_recorded(runs):
    found = runs["constant"]
    (reading,) = found.arms[0].readings
    assert reading.name == BY_MEAN
    assert reading.variance.pairs == 2
    assert reading.ne_percent.value == 0.0  # the arm changes nothing
    for run in found.runs:
        assert run.mean_quality.ne < run.quality.ne  # wandering weights are worse than their mean


@pytest.mark.slow
def test_records_from_before_are_read(runs):
    content = encode(runs["cosine"])
    for name in ("annealed", "planned", "world"):
        del content[name]
    for arm in content["arms"]:
        del arm["readings"], arm["key"]
    for run in content["runs"]:
        del run["mean_quality"], run["final_rate"]
    old = decode(Validation, content)
    assert (old.annealed, old.planned, old.arms[0].readings) == (None, None, ())
    assert old.runs[0].final_rate == 1.0
    assert old.runs[0].mean_quality is None
