"""The world behind the synthetic clicks: how features are drawn, and the teacher that draws the labels.

    logit = bias + a1 * linear + a2 * pairwise + a3 * low_rank
    linear   = sum_f w[id_f] + sum_j w_j x_j
    pairwise = 1/2 (|sum v|^2 - sum |v|^2)    a factorization machine: a factor v per id, x_j v_j per dense
    low_rank = sum_r tanh(p_r)                p a rank-3 projection of all ids and dense features

Each component is standardized on a fixed sample, so the weights a are standard deviations of the logit. The
bias is found by bisection on the same sample so that the mean probability is the base rate. Everything
follows from the seed; the trade-off is that tail ids carry weights that no finite training set can learn,
as in real click logs.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

FACTORS = 4
PROJECTIONS = 3
WIDTH = 1 + FACTORS + PROJECTIONS
LOGIT_STD = (0.9, 0.9, 0.8)  # linear, pairwise, low rank
CALIBRATION_ROWS = 65536
# Streams of one seed: what is fixed about the world, its calibration sample, its rows.
FIXED, CALIBRATION, ROWS = 0, 1, 2
# Shares of missing values that columns cycle through; Criteo's columns span 0 to 45 %.
MISSING = (0.0, 0.05, 0.0, 0.2, 0.45)


@dataclass(frozen=True, kw_only=True)
class WorldConfig:
    """All that a world follows from."""

    seed: int
    vocab_sizes: tuple[int, ...]
    dense_features: int
    base_rate: float
    alpha: float


@dataclass(frozen=True, kw_only=True)
class World:
    """What is fixed by the seed. `table` [sum V, WIDTH] holds each id's teacher weights."""

    offsets: np.ndarray
    cdfs: tuple[np.ndarray, ...]
    dense_location: np.ndarray
    dense_spread: np.ndarray
    dense_missing: np.ndarray
    table: np.ndarray
    dense_weights: np.ndarray
    dense_centre: np.ndarray
    dense_scale: np.ndarray
    component_mean: np.ndarray
    component_gain: np.ndarray
    bias: float


@dataclass(frozen=True, kw_only=True)
class Features:
    """`dense` [n, D] float32 encoded, `sparse` [n, F] int64, and how many of each are missing per row [n]."""

    dense: np.ndarray
    sparse: np.ndarray
    missing_dense: np.ndarray
    missing_sparse: np.ndarray


def stream(seed: int, kind: int, index: int = 0) -> np.random.Generator:
    """An independent random stream per (seed, kind, index)."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, kind, index])))


@lru_cache(maxsize=8)
def make_world(config: WorldConfig) -> World:
    """Draw the fixed part of the world and calibrate its teacher; the same config gives the same world."""
    vocab_sizes, dense_features = config.vocab_sizes, config.dense_features
    rng = stream(config.seed, FIXED)
    missing = np.array([MISSING[f % len(MISSING)] for f in range(len(vocab_sizes))])
    cdfs = tuple(id_cdf(size, config.alpha, share) for size, share in zip(vocab_sizes, missing, strict=True))
    # A table's say in the logit shrinks with its size: large tables are mostly names of rare things.
    # Interactions are uneven: spread over all pairs of columns, no finite training set could show them.
    spread = np.array([0.4] + [1.0] * (WIDTH - 1))
    importance = np.exp(spread * rng.standard_normal((len(vocab_sizes), WIDTH)))
    importance /= np.log1p(vocab_sizes)[:, None] ** np.where(spread < 1.0, 0.5, 1.0)
    table = rng.standard_normal((sum(vocab_sizes), WIDTH)) * np.repeat(importance, vocab_sizes, axis=0)
    world = World(
        offsets=np.concatenate([[0], np.cumsum(vocab_sizes)[:-1]]).astype(np.int64),
        cdfs=cdfs,
        dense_location=rng.uniform(-0.5, 4.0, dense_features).astype(np.float32),
        dense_spread=rng.uniform(0.5, 2.5, dense_features).astype(np.float32),
        dense_missing=np.array([MISSING[(j + 1) % len(MISSING)] for j in range(dense_features)], np.float32),
        table=table.astype(np.float32),
        dense_weights=(0.4 * rng.standard_normal((dense_features, WIDTH))).astype(np.float32),
        dense_centre=np.zeros(dense_features, np.float32),
        dense_scale=np.ones(dense_features, np.float32),
        component_mean=np.zeros(3),
        component_gain=np.ones(3),
        bias=0.0,
    )
    return _calibrated(world, seed=config.seed, base_rate=config.base_rate)


def draw_features(world: World, rng: np.random.Generator, rows: int) -> Features:
    """Independent rows. Dense: log1p of lognormal counts, missing -> 0. Sparse: Zipf ids, missing -> 0."""
    sparse = np.empty((rows, len(world.cdfs)), np.int64)
    uniform = rng.random((len(world.cdfs), rows), dtype=np.float32)
    for column, cdf in enumerate(world.cdfs):
        sparse[:, column] = np.searchsorted(cdf, uniform[column], side="right")
    features = len(world.dense_location)
    normal = rng.standard_normal((rows, features), dtype=np.float32)
    counts = np.floor(np.exp(world.dense_location + world.dense_spread * normal))
    absent = rng.random((rows, features), dtype=np.float32) < world.dense_missing
    dense = np.where(absent, np.float32(0.0), np.log1p(counts))
    return Features(
        dense=dense, sparse=sparse, missing_dense=absent.sum(axis=1), missing_sparse=(sparse == 0).sum(axis=1)
    )


def teacher_logits(world: World, dense: np.ndarray, sparse: np.ndarray) -> np.ndarray:
    """The teacher's logit of each row [n], float64, from encoded dense [n, D] and ids [n, F]."""
    components = _components(world, dense, sparse)
    return world.bias + ((components - world.component_mean) * world.component_gain).sum(axis=1)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """The click probabilities [n] of logits [n]."""
    return 1.0 / (1.0 + np.exp(-logits))


def base_rate_bias(logits: np.ndarray, base_rate: float) -> float:
    """What to add to logits [n] so that the mean probability is `base_rate`, by bisection."""
    spread = float(np.abs(logits).max())
    centre = math.log(base_rate / (1.0 - base_rate))
    low, high = centre - spread, centre + spread
    for _ in range(60):
        middle = 0.5 * (low + high)
        if sigmoid(logits + middle).mean() < base_rate:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def id_cdf(size: int, alpha: float, missing: float) -> np.ndarray:
    """Cumulative probabilities of ids 0..size-1: id 0 is a missing value, id i >= 1 has weight i^-alpha."""
    weights = np.arange(1, size) ** -alpha
    cdf = np.cumsum(np.concatenate([[missing], (1.0 - missing) * weights / weights.sum()]))
    # float32 rounding must neither leave a gap above the last id nor put one out of range.
    cdf[-1] = 1.0
    return cdf.astype(np.float32)


def _components(world: World, dense: np.ndarray, sparse: np.ndarray) -> np.ndarray:
    """linear, pairwise and low_rank of each row [n, 3]."""
    standard = (dense - world.dense_centre) / world.dense_scale
    total = standard @ world.dense_weights
    squares = (standard**2) @ (world.dense_weights[:, 1 : 1 + FACTORS] ** 2)
    for column, offset in enumerate(world.offsets):
        weights = world.table.take(sparse[:, column] + offset, axis=0)
        total += weights
        squares += weights[:, 1 : 1 + FACTORS] ** 2
    linear = total[:, 0]
    pairwise = 0.5 * (total[:, 1 : 1 + FACTORS] ** 2 - squares).sum(axis=1)
    low_rank = np.tanh(total[:, 1 + FACTORS :]).sum(axis=1)
    return np.stack([linear, pairwise, low_rank], axis=1).astype(np.float64)


def _calibrated(world: World, *, seed: int, base_rate: float) -> World:
    sample = draw_features(world, stream(seed, CALIBRATION), CALIBRATION_ROWS)
    world = replace(
        world, dense_centre=sample.dense.mean(axis=0), dense_scale=sample.dense.std(axis=0) + np.float32(1e-6)
    )
    components = _components(world, sample.dense, sample.sparse)
    world = replace(
        world,
        component_mean=components.mean(axis=0),
        component_gain=np.array(LOGIT_STD) / (components.std(axis=0) + 1e-12),
    )
    unbiased = teacher_logits(world, sample.dense, sample.sparse)
    return replace(world, bias=base_rate_bias(unbiased, base_rate))
