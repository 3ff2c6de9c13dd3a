import math

import pytest
import torch
from small_run import RandomRows, small_model

from loka.data.batch import Batch
from loka.train import RunningQuality, Segments, TrainConfig, quality, train

BIN = 1 / 128  # of logits, in the histogram that AUC is taken from


def rows(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count, generator=generator) - 1
    labels = (torch.rand(count, generator=generator) < logits.sigmoid()).float()
    losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return losses, logits, labels


def add(running, parts, *, step=50):
    for first in range(0, len(parts[0]), step):
        running.add(*(part[first : first + step] for part in parts))


def agree(found, exact, *, auc):
    # Losses are float32 here and float64 in `quality`: one rounding, 6e-8, per loss.
    assert found.ne == pytest.approx(exact.ne, rel=1e-6)
    assert found.logloss == pytest.approx(exact.logloss, rel=1e-6)
    assert found.calibration == pytest.approx(exact.calibration, rel=1e-6)
    assert found.base_rate == exact.base_rate
    assert found.rows == exact.rows
    assert found.auc == pytest.approx(exact.auc, abs=auc)


def ties(logits, labels):
    """Half the share of pairs that lie in one bin: how far off the AUC can be."""
    bins = (logits / BIN).floor()
    same = bins[labels > 0.5][:, None] == bins[labels < 0.5][None, :]
    return float(same.double().mean()) / 2


def test_lifetime_and_window_equal_the_whole():
    parts = rows(2000)
    _, logits, labels = parts
    running = RunningQuality(window=16)  # 8 blocks of 2 steps
    add(running, parts)  # 40 steps: the last 16 are in the window
    reading = running.read()
    assert ties(logits, labels) < 1e-3
    agree(reading.lifetime, quality(logits, labels), auc=ties(logits, labels))
    agree(reading.window, quality(logits[1200:], labels[1200:]), auc=ties(logits[1200:], labels[1200:]))
    running.add(*(part[:50] for part in parts))  # begins a block: the oldest one leaves
    assert running.read().window.rows == 15 * 50


@pytest.mark.parametrize(
    ("window", "least", "most"), [(1, 1, 1), (5, 5, 5), (8, 8, 8), (15, 13, 14), (20, 16, 18), (21, 19, 21)]
)
def test_window_never_covers_more_than_it_says(window, least, most):
    running, parts = RunningQuality(window=window), rows(50)
    for step in range(60):
        running.add(*(part[:1] for part in parts))
        if step >= window:
            assert least <= running.read().window.rows <= most


def test_window_is_all_until_it_is_full():
    running = RunningQuality(window=1000)
    add(running, rows(300))
    reading = running.read()
    assert reading.window == reading.lifetime


def test_a_restart_changes_no_bit():
    parts = rows(1000)
    straight, running = RunningQuality(window=8), RunningQuality(window=8)
    add(straight, parts)
    add(running, tuple(part[:650] for part in parts))
    resumed = RunningQuality(window=8)
    resumed.load_state_dict(running.state_dict())
    add(resumed, tuple(part[650:] for part in parts))
    assert resumed.read() == straight.read()
    assert resumed.rows == 1000


def test_blocks_of_other_lengths_fill_anew():
    """As checkpoints of before have them."""
    parts, before, running = rows(100), RunningQuality(window=16), RunningQuality(window=21)
    add(before, parts)
    running.load_state_dict(before.state_dict())
    assert running.read().lifetime == before.read().lifetime
    assert running.read().window.rows == 0


def test_nothing_is_known_of_no_rows_or_one_class():
    assert math.isnan(RunningQuality().read().lifetime.ne)
    running = RunningQuality()
    running.add(torch.ones(4), torch.zeros(4), torch.zeros(4))
    lifetime = running.read().lifetime
    assert math.isnan(lifetime.ne)
    assert math.isnan(lifetime.auc)
    assert math.isnan(lifetime.calibration)
    assert lifetime.logloss == 1.0


def test_a_bad_logit_shows_in_the_loss_and_stops_nothing():
    running = RunningQuality(segments=Segments(("a",), lambda batch: batch.sparse[:, 0], by="a"))
    bad = torch.tensor([1.0, math.nan, math.inf])
    running.add(bad, bad, torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 1]))
    assert not math.isfinite(running.losses_and_clicks()[0])
    assert running.read().segments["other"].rows == 1


def test_segments_split_the_rows():
    losses, logits, labels = rows(1000)
    place = torch.arange(1000) % 5 - 1  # -1 and 3 are no segment
    segments = Segments(("a", "b", "c"), lambda batch: batch.sparse[:, 0], by="place")
    running = RunningQuality(segments=segments)
    losses[0] = torch.inf  # of no segment, and spoils none
    add(running, (losses, logits, labels, place))
    found = running.read().segments
    assert list(found) == ["a", "b", "c", "other"]
    for at, name in enumerate("abc"):
        exact = quality(logits[place == at], labels[place == at])
        assert found[name].ne == pytest.approx(exact.ne, rel=1e-6)
        assert found[name].calibration == pytest.approx(exact.calibration, rel=1e-6)
    assert found["other"].rows == 400


def test_segments_of_a_column_while_training():
    source = RandomRows(640)
    config = TrainConfig(batch_size=64, precision="fp32")
    segments = Segments.of_column(1, ids=(3, 7), name="site")
    result = train(small_model(), source, config=config, segments=segments)
    found = {name: quality.rows for name, quality in result.reading.segments.items()}
    counted = torch.cat([b.sparse[:, 1] for b in source.batches(64)])
    wanted = {f"site = {id}": int((counted == id).sum()) for id in (3, 7)}
    assert found == {**wanted, "other": 640 - sum(wanted.values())}


def test_columns_by_their_first_ids():
    segments = Segments.of_column(0, ids=range(3))
    sparse = torch.tensor([[0], [2], [5]])
    batch = Batch(dense=torch.zeros(3, 1), sparse=sparse, label=torch.zeros(3))
    assert segments.of(batch).tolist() == [0, 2, 5]
    assert segments.names == ("sparse 0 = 0", "sparse 0 = 1", "sparse 0 = 2")


@pytest.mark.parametrize("names", [(), ("a", "a"), ("other",)])
def test_names_of_segments_differ(names):
    with pytest.raises(ValueError, match="segments"):
        Segments(names, lambda batch: batch.label, by="")


@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 0.005), (0.0, 0.02), (0.0, 0.2), (-3.0, 1.0), (-20.0, 2.0)])
def test_auc_is_near_the_exact_one_or_not_known(mean, deviation):
    """Of logits that lie in few bins, or beyond the last, it was off by up to 0.25."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(20_000, generator=generator)
    labels = (torch.rand(20_000, generator=generator) < (1.4 * scores - 1).sigmoid()).float()
    logits = (mean + deviation * scores).float()
    running = RunningQuality()
    running.add(torch.ones_like(labels), logits, labels)
    found, exact = running.read().lifetime.auc, quality(scores, labels).auc
    assert 0.7 < exact < 0.9
    if deviation < 0.1 or mean < -16:
        assert math.isnan(found)
    else:
        assert abs(found - exact) < 1e-3


def test_a_segment_for_each_row():
    running = RunningQuality(segments=Segments(("a", "b"), lambda batch: batch, by="test"))
    losses, logits, labels = rows(8)
    with pytest.raises(ValueError, match=r"gives 1 places in .* to 8 rows"):
        running.add(losses, logits, labels, torch.tensor([1]))
