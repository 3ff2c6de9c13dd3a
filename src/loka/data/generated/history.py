"""A history for the synthetic rows, and what it does to the label; off unless it is asked for.

    effect = gain * (<t[item] + u, pool> - mean),   pool = sum_k w_k e[seen_k] / |w|,   w_k = 0.8^(n - k)

`item` is the id in the first sparse column, `seen` are ids of the same column, oldest first: the label
depends on how the item goes with what was seen last, which no model learns that does not read the sequence.
Like the other components of the teacher it is standardized on the calibration sample, and the bias is found
anew.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from loka.data.generated.teacher import (
    CALIBRATION,
    CALIBRATION_ROWS,
    FACTORS,
    WorldConfig,
    base_rate_bias,
    draw_features,
    id_cdf,
    make_world,
    stream,
    teacher_logits,
)

LOGIT_STD = 0.8
DECAY = 0.8
# Streams of one seed, next to those of the teacher.
_FIXED, _CALIBRATION, ROWS = 3, 4, 5


@dataclass(frozen=True, kw_only=True)
class HistoryWorld:
    """Fixed by the seed: `item` t, `seen` e [V, FACTORS], `direct` u [FACTORS]; `shift` corrects the bias."""

    length: int
    cdf: np.ndarray
    item: np.ndarray
    seen: np.ndarray
    direct: np.ndarray
    mean: float
    gain: float
    shift: float


@lru_cache(maxsize=8)
def make_history(config: WorldConfig, length: int) -> HistoryWorld:
    """Draw the fixed part and calibrate it; the same config and length give the same history."""
    rng = stream(config.seed, _FIXED)
    size = config.vocab_sizes[0]
    history = HistoryWorld(
        length=length,
        cdf=id_cdf(size, config.alpha, 0.0),
        item=rng.standard_normal((size, FACTORS)).astype(np.float32),
        seen=rng.standard_normal((size, FACTORS)).astype(np.float32),
        direct=rng.standard_normal(FACTORS).astype(np.float32),
        mean=0.0,
        gain=1.0,
        shift=0.0,
    )
    world = make_world(config)
    sample = draw_features(world, stream(config.seed, CALIBRATION), CALIBRATION_ROWS)
    sequence, lengths = draw_history(history, stream(config.seed, _CALIBRATION), CALIBRATION_ROWS)
    raw = _raw(history, sample.sparse[:, 0], sequence, lengths)
    mean, gain = float(raw.mean()), LOGIT_STD / (float(raw.std()) + 1e-12)
    logits = teacher_logits(world, sample.dense, sample.sparse) + gain * (raw - mean)
    shift = base_rate_bias(logits, config.base_rate)
    fixed = {name: getattr(history, name) for name in ("length", "cdf", "item", "seen", "direct")}
    return HistoryWorld(**fixed, mean=mean, gain=gain, shift=shift)


def draw_history(history: HistoryWorld, rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences [n, L] int64, padded with 0 on the right, and lengths [n] int64: exponential, mean L / 3."""
    length = history.length
    lengths = np.minimum(rng.exponential(length / 3, rows).astype(np.int64), length)
    uniform = rng.random((rows, length), dtype=np.float32)
    sequence = np.searchsorted(history.cdf, uniform, side="right").astype(np.int64)
    return np.where(np.arange(length) < lengths[:, None], sequence, 0), lengths


def history_logits(history: HistoryWorld, item: np.ndarray, sequence: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """What the history adds to the teacher's logit of each row [n], float64."""
    return history.gain * (_raw(history, item, sequence, lengths) - history.mean) + history.shift


def _raw(history: HistoryWorld, item: np.ndarray, sequence: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    age = lengths[:, None] - 1 - np.arange(history.length)
    weight = np.where(age >= 0, DECAY ** np.maximum(age, 0), 0.0).astype(np.float32)
    weight /= np.sqrt((weight**2).sum(axis=1, keepdims=True)) + np.float32(1e-12)
    pool = np.einsum("nl,nlf->nf", weight, history.seen[sequence])
    return ((history.item[item] + history.direct) * pool).sum(axis=1).astype(np.float64)
