"""Drawing operands from statistics: T = mu + Z L^T, W = M + L_U Z L_V^T, or plain normal numbers.

Where the statistics hold sketches of tails (statistics/tails.py), magnitudes of T are then moved to them; and
where they hold how the rows of grad_output go with those of input, `samplers` draws both together, and
by sample where samples have several rows (statistics/sample_draws.py).
"""

from collections.abc import Callable, Mapping

import torch

from loka.core.exceptions import UnknownName
from loka.core.records.stats import Distribution
from loka.statistics import gaussian, matrix_normal, sample_coherence, tails
from loka.statistics.sample_draws import Moments, by_sample, draw_samples

NORMAL = "normal"
_POOL_DRAWS, _POOL_ELEMENTS = 16, 1 << 24  # draws that a pool of rows with tails is made for; its size

Sampler = Callable[[int, torch.Generator], torch.Tensor]
"""(rows, generator) -> float32 [rows, K]; for a weight `rows` is ignored and [N, K] returned."""


def normal(
    features: int, *, rows: int | None = None, std: float = 1.0, spread: float = 0.0, seed: int = 0
) -> Distribution:
    """Independent normal numbers of mean 0, for shapes without a model: nothing was learnt, so no tensors.

    Feature j has the standard deviation std * exp(spread z_j - spread^2), z_j standard normal from
    `seed`: the features' scales are log-normal and their mean square stays std^2.

    Args:
        features: K of operands [*, K].
        rows: N of a weight [N, K]; None for an operand whose rows are asked for.
    """
    # `count` is what readers of an operand ask first: how many rows stand behind it.
    numbers = {"features": features, "rows": rows, "std": std, "spread": spread, "seed": seed}
    return Distribution(kind=NORMAL, numbers={**numbers, "count": 1})


def sampler(distribution: Distribution, device: torch.device, *, keep_tails: bool = True) -> Sampler:
    """Prepares the factors once and returns a function that draws.

    Without `keep_tails`, or where no tails were learnt, rows are Gaussian. Raises UnknownName for a
    kind of distribution this version cannot draw from.
    """
    moved = distribution.to(device)
    if distribution.kind == gaussian.KIND:
        draw = _gaussian_sampler(gaussian.from_distribution(moved))
        return _tailed(draw, tails.tails_in(moved) if keep_tails else None)
    if distribution.kind == matrix_normal.KIND:
        return _matrix_normal_sampler(matrix_normal.from_distribution(moved))
    if distribution.kind == NORMAL:
        return _normal_sampler(distribution, device)
    raise UnknownName(
        f"cannot draw from statistics of kind {distribution.kind!r}",
        way_out=f"this version knows {gaussian.KIND}, {matrix_normal.KIND} and {NORMAL}; use the LoKA that wrote them",
    )


def samplers(
    operands: Mapping[str, Distribution], device: torch.device, *, keep_tails: bool = True
) -> dict[str, Sampler]:
    """A sampler for each operand of a layer, as `sampler` makes it.

    Where the statistics say how grad_output goes with input, a draw of grad_output belongs to the rows
    of the last draw of input, if that had as many; otherwise its rows are independent of them.
    """
    pair: dict[str, Sampler] = {}
    if keep_tails and {"input", "grad_output"} <= operands.keys():
        pair = _paired(operands["input"].to(device), operands["grad_output"].to(device))
    # In the order of `operands`: input is drawn before the grad_output that belongs to it.
    return {name: pair.get(name) or sampler(kept, device, keep_tails=keep_tails) for name, kept in operands.items()}


def _paired(input: Distribution, grad_output: Distribution) -> dict[str, Sampler]:
    """Samplers of both operands whose rows go together: g = mean_g + M (x - mean_x) + rest, or by sample.

    M [N, K] is how g goes with x in the mean (statistics/tails.py `coupling`), and `rest` has what is left of g's
    covariance. Where samples have several rows, rows are drawn by sample (statistics/sample_draws.py). Empty where the
    statistics do not say how the two go together, or keep no whole covariance of either.
    """
    cross = tails.cross_in(grad_output)
    if cross is None or {input.kind, grad_output.kind} != {gaussian.KIND}:
        return {}
    x, g = gaussian.from_distribution(input), gaussian.from_distribution(grad_output)
    if x.scatter is None or g.scatter is None or not min(x.count, g.count, cross.count.item()) > 1:
        return {}
    x_covariance, g_covariance = x.scatter / (x.count - 1), g.scatter / (g.count - 1)
    m = tails.coupling(cross, (x.mean, g.mean), x_covariance)
    rest = g_covariance.double() - m @ x_covariance.double() @ m.t()
    samples = sample_coherence.samples_in(grad_output)
    plan = None if samples is None else by_sample(samples, x, g, cross)
    moments = Moments(
        x_mean=x.mean,
        g_mean=g.mean,
        x_root=_root(x_covariance),
        coupling=m.float(),
        rest_root=_root(rest if plan is None else rest - plan.covariance),
    )
    x_tails, g_tails = tails.tails_in(input), tails.tails_in(grad_output)

    def draw_both(draws: int, rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        if plan is not None:
            sample = _samples(draws, rows, plan.rows).to(generator.device)
            return draw_samples(plan, moments, (x_tails, g_tails), sample, generator)
        known = _normal((draws * rows, x.features), generator) @ moments.x_root.t()
        noise = _normal((draws * rows, g.features), generator) @ moments.rest_root.t()
        drawn = g.mean + known @ moments.coupling.t() + noise
        drawn = tails.reshape(drawn, g_tails, generator) if g_tails else drawn
        known = x.mean + known
        return (tails.reshape(known, x_tails, generator) if x_tails else known), drawn

    both = _Pool(draw_both, x.features + g.features)
    alone = _Pool(draw_both, x.features + g.features)

    def draw_input(rows: int, generator: torch.Generator) -> torch.Tensor:
        return both.next(rows, generator)[0]

    def draw_grad_output(rows: int, generator: torch.Generator) -> torch.Tensor:
        belongs, both.last = both.last, ()
        if belongs and len(belongs[1]) == rows:
            return belongs[1]
        return alone.next(rows, generator)[1]

    return {"input": draw_input, "grad_output": draw_grad_output}


def _samples(draws: int, rows: int, of_each: int) -> torch.Tensor:
    """The sample [draws * rows] that each row belongs to; samples begin anew with each draw."""
    within = torch.arange(rows, device="cpu") // of_each
    return (torch.arange(draws, device="cpu").unsqueeze(1) * (within[-1] + 1) + within).flatten()


class _Pool:
    """Hands out rows of a larger draw, each once, and then makes the next one (statistics/tails.py).

    `draw` gets the number of draws and the rows of each.
    """

    def __init__(self, draw: Callable[[int, int, torch.Generator], tuple[torch.Tensor, ...]], features: int) -> None:
        self._draw = draw
        self._most = _POOL_ELEMENTS // max(features, 1)
        self._rest: tuple[torch.Tensor, ...] = ()
        self.last: tuple[torch.Tensor, ...] = ()

    def next(self, rows: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        if not self._rest or len(self._rest[0]) < rows:
            draws = max(1, min(_POOL_DRAWS, self._most // max(rows, 1)))
            self._rest = self._draw(draws, rows, generator)
        self.last = tuple(part[:rows] for part in self._rest)
        self._rest = tuple(part[rows:] for part in self._rest)
        return self.last


def _tailed(draw: Sampler, kept: tails.Tails | None) -> Sampler:
    if kept is None:
        return draw

    def reshaped(draws: int, rows: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        return (tails.reshape(draw(draws * rows, generator), kept, generator),)

    pool = _Pool(reshaped, kept.columns.shape[0])
    return lambda rows, generator: pool.next(rows, generator)[0]


def _normal_sampler(distribution: Distribution, device: torch.device) -> Sampler:
    numbers = distribution.numbers
    features, spread = numbers["features"], numbers["spread"]
    # On the CPU, so that the features have the same scales on every device.
    z = torch.randn(
        features, generator=torch.Generator().manual_seed(numbers["seed"]), dtype=torch.float32, device="cpu"
    )
    std = (numbers["std"] * (spread * z - spread**2).exp()).to(device)

    def draw(rows: int, generator: torch.Generator) -> torch.Tensor:
        # In place: a weight of 147840 x 16384 in float32 is 9.7 GB.
        values = _normal((numbers["rows"] or rows, features), generator)
        return values.mul_(std)

    return draw


def _gaussian_sampler(learnt: gaussian.Gaussian) -> Sampler:
    """Rows mu + z L^T with L L^T the covariance; of a low rank with a diagonal, mu + z F + e sqrt(diagonal)."""
    freedom = max(learnt.count - 1, 1)
    mean = learnt.mean
    if learnt.scatter is not None:
        root = _root(learnt.scatter / freedom)

        def draw_full(rows: int, generator: torch.Generator) -> torch.Tensor:
            return mean + _normal((rows, learnt.features), generator) @ root.t()

        return draw_full
    assert learnt.factor is not None
    factor = learnt.factor / freedom**0.5
    spread = (learnt.square / freedom - factor.square().sum(dim=0)).clamp_min(0).sqrt()

    def draw_low_rank(rows: int, generator: torch.Generator) -> torch.Tensor:
        common = _normal((rows, factor.shape[0]), generator) @ factor
        return mean + common + _normal((rows, learnt.features), generator) * spread

    return draw_low_rank


def _matrix_normal_sampler(learnt: matrix_normal.MatrixNormal) -> Sampler:
    """Weights M + L_U Z L_V^T [N, K] with the covariances U of rows and V of columns, in full or diagonal."""
    rows_root, columns_root = _root(learnt.rows), _root(learnt.columns)

    def draw(rows: int, generator: torch.Generator) -> torch.Tensor:
        noise = _normal(tuple(learnt.mean.shape), generator)
        noise = noise * rows_root.unsqueeze(1) if rows_root.dim() == 1 else rows_root @ noise
        noise = noise * columns_root if columns_root.dim() == 1 else noise @ columns_root.t()
        return learnt.mean + noise

    return draw


def _root(covariance: torch.Tensor) -> torch.Tensor:
    """R with R R^T = covariance, or the square roots of a diagonal; rank deficiency is fine."""
    if covariance.dim() == 1:
        return covariance.clamp_min(0).sqrt()
    values, vectors = torch.linalg.eigh(covariance.double())
    return (vectors * values.clamp_min(0).sqrt()).float()


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
