"""Rows of input and grad_output drawn by sample, so that they add up in grad_weight as real samples do.

    g_st = mean_g + M (x_st - mean_x) + B_s x_st + rest_st,    B_s = sum_i c_si V_i,   |c_s| the same for all

M is how g goes with x in the mean of all samples (statistics/tails.py), B_s how it does in sample s alone, in
the directions V_i in which the sketch (statistics/sample_coherence.py) saw samples add up. They come from the
second moment over pairs of different rows,

    E vec(g_t x_t^T) vec(g_u x_u^T)^T = (F^T F - what single rows give) / pairs,

less its mean, and less what rows have in common by being alike (shares a_x, a_g of their deviations from
the mean belong to the sample). Of all B for which E sum_t B x_t x_t^T = T B D, D = E x x^T, comes to lie
along V, the one that takes least of g's energy tr(B D B^T) is B ~ V. The size is set so that E |M_s|^2 is
as observed; `rest` keeps g's covariance. Energies then go to rows by scores that have in common, within
samples and between x and g, what log energies have.
"""

import math
from dataclasses import dataclass

import torch

from loka.statistics.gaussian import Gaussian
from loka.statistics.sample_coherence import SUMS, Samples
from loka.statistics.tails import Cross, Tails, reshape

_MOST = 0.99  # share that rows of a sample have in common: 1 leaves no room for scores of their own


@dataclass(frozen=True, kw_only=True)
class BySample:
    """How samples are drawn: `rows` that each has; what their deviations share in `x` and `g`.

    `slopes` [r, N, K], the `weights` [r] that they have in E |M_s|^2, and the `covariance` [N, N] that they
    give g. What log energies of x and g share, and their correlations: of the shared and of the own parts.
    """

    rows: int
    x: float
    g: float
    slopes: torch.Tensor
    weights: torch.Tensor
    covariance: torch.Tensor
    energy_x: float
    energy_g: float
    energies: float
    own_energies: float


def by_sample(samples: Samples, x: Gaussian, g: Gaussian, cross: Cross) -> BySample | None:
    """None where the sketch saw no two rows of one sample. `x` and `g` keep their whole scatter."""
    s = dict(zip(SUMS, samples.sums.tolist(), strict=True))
    if not s["pairs"] or not s["energy"]:
        return None
    assert x.scatter is not None
    assert g.scatter is not None
    x_covariance, g_covariance = (v.double() / max(n - 1, 1) for v, n in ((x.scatter, x.count), (g.scatter, g.count)))
    x_mean, g_mean = x.mean.double(), g.mean.double()
    d, d_g = x_covariance + torch.outer(x_mean, x_mean), g_covariance + torch.outer(g_mean, g_mean)
    mean = cross.mean
    share_x = _share(s, "x", x_mean, x_covariance)
    share_g = _share(s, "g", g_mean, g_covariance)
    # What two rows of a sample give to E <g_t x_t^T, g_u x_u^T>: all, and what being alike explains.
    pair = (s["coherent"] - s["energy"]) / s["pairs"] - mean.square().sum().item()
    by_g = (g_covariance.trace() * (x_mean.square().sum() + share_x * x_covariance.trace())).item()
    by_x = (g_mean.square().sum() * share_x * x_covariance.trace()).item()
    share_g = min(share_g, max(pair - by_x, 0.0) / by_g) if by_g > 0 else 0.0
    slopes, weights = mean.new_zeros(0, *mean.shape), mean.new_zeros(0)
    directions, values = _principal(samples.factor.double(), mean.shape)
    left = pair - by_x - share_g * by_g
    if len(values) and left > 0:
        excess = s["energy"] * s["rows"] / max(s["x"] * s["g"], 1e-300)  # large rows of x and g meet
        single = s["rows"] * excess * _moment(directions, d_g, d)
        alike_x = share_x * x_covariance
        alike = share_g * _moment(directions, g_covariance, torch.outer(x_mean, x_mean) + alike_x)
        alike = alike + _moment(directions, torch.outer(g_mean, g_mean), alike_x)
        along = torch.einsum("rnk,nk->r", directions, mean)
        moment = (torch.diag(values) - single) / s["pairs"] - alike - torch.outer(along, along)
        found, turn = torch.linalg.eigh(moment)
        found = found.clamp_min(0)
        if found.sum() > 0:
            slopes = torch.einsum("rj,rnk->jnk", turn * found.sqrt(), directions)
            sizes = (slopes @ d).square().sum(dim=(1, 2))
            slopes, weights = slopes * (left / sizes.sum()).sqrt(), sizes / sizes.sum()
    return BySample(
        rows=1 + round(s["all_pairs"] / s["all_rows"]),  # if T varies, as many others as a row has on average
        x=share_x,
        g=share_g,
        slopes=slopes.float(),
        weights=weights.float(),
        covariance=torch.einsum("rnk,kl,rml->nm", slopes, d, slopes),
        **_energies(s),
    )


def _share(s: dict[str, float], name: str, mean: torch.Tensor, covariance: torch.Tensor) -> float:
    """Of the deviations from the mean, what the rows of a sample have in common; 0 if they go apart."""
    common = (s[f"{name}_sum"] - s[name]) / s["pairs"] - mean.square().sum().item()
    return min(max(common / max(covariance.trace().item(), 1e-300), 0.0), _MOST)


def _principal(factor: torch.Tensor, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Orthonormal [r, N, K] and values [r] with F^T F = sum_i value_i P_i P_i^T."""
    values, vectors = torch.linalg.eigh(factor @ factor.t())
    kept = values > 1e-12 * values.clamp_min(0).sum()
    values = values[kept]
    return ((vectors[:, kept].t() @ factor) / values.sqrt().unsqueeze(1)).view(-1, *shape), values


def _moment(directions: torch.Tensor, g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """[r, r]: E <P_i, g x^T> <P_j, g x^T> for independent g and x with the second moments `g`, `x`."""
    return directions.flatten(1) @ (g @ directions @ x).flatten(1).t()


def _energies(s: dict[str, float]) -> dict[str, float]:
    """Shares of the variance of log energies that belong to the sample, and correlations of either part."""
    alive, pairs = max(s["alive"], 1.0), max(s["alive_pairs"], 1.0)
    common, own = {}, {}
    for one, other in ("xx", "xg", "gg"):
        mean = s[f"log_{one}"] * s[f"log_{other}"] / alive**2
        name = f"log_{one}_sum" if one == other else "log_xg_sum"
        common[one + other] = (s[name] - s[f"log_{one}{other}"]) / pairs - mean
        own[one + other] = s[f"log_{one}{other}"] / alive - mean - common[one + other]
    shares = [min(max(common[v] / max(common[v] + own[v], 1e-300), 0.0), _MOST) for v in ("xx", "gg")]
    return {
        "energy_x": shares[0],
        "energy_g": shares[1],
        "energies": _correlation(common),
        "own_energies": _correlation(own),
    }


def _correlation(of: dict[str, float]) -> float:
    both = max(of["xx"], 0.0) * max(of["gg"], 0.0)
    return min(max(of["xg"] / math.sqrt(both), -_MOST), _MOST) if both > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Of the rows drawn: means; a root of x's covariance; M; a root of what is left of g's covariance."""

    x_mean: torch.Tensor
    g_mean: torch.Tensor
    x_root: torch.Tensor
    coupling: torch.Tensor
    rest_root: torch.Tensor


def draw_samples(
    plan: BySample,
    moments: Moments,
    tails: tuple[Tails | None, Tails | None],
    sample: torch.Tensor,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [m, K] and g [m, N] whose rows belong to the samples `sample` [m], numbered from 0 on."""
    count = int(sample[-1]) + 1

    def normal(rows: int, features: int) -> torch.Tensor:
        return torch.randn(rows, features, generator=generator, device=generator.device, dtype=torch.float32)

    def deviations(root: torch.Tensor, share: float) -> torch.Tensor:
        own = normal(len(sample), root.shape[1]) * math.sqrt(1 - share)
        if share:
            own += (normal(count, root.shape[1]) * math.sqrt(share))[sample]
        return own @ root.t()

    score_x, other = normal(count, 1).squeeze(1), normal(count, 1).squeeze(1)
    score_g = plan.energies * score_x + math.sqrt(1 - plan.energies**2) * other
    x = moments.x_mean + deviations(moments.x_root, plan.x)
    if tails[0] is not None:
        x = reshape(x, tails[0], generator, lambda e: _order(e, sample, score_x, plan.energy_x))
    g = moments.g_mean + (x - moments.x_mean) @ moments.coupling.t() + deviations(moments.rest_root, plan.g)
    if len(plan.slopes):
        coefficients = normal(count, len(plan.slopes))
        # How large a sample is, its energy says: here all have the same size, and only directions vary.
        coefficients /= (coefficients.square() @ plan.weights).sqrt().unsqueeze(1)
        for c, slope in zip(coefficients.t(), plan.slopes, strict=True):
            g += c[sample].unsqueeze(1) * (x @ slope.t())
    if tails[1] is not None:
        beside = _own(_scores(x.double().square().sum(dim=1)), sample, count)

        def order(energy: torch.Tensor) -> torch.Tensor:
            return _order(energy, sample, score_g, plan.energy_g, beside, plan.own_energies)

        g = reshape(g, tails[1], generator, order)
    return x, g


def _order(
    energy: torch.Tensor,
    sample: torch.Tensor,
    score: torch.Tensor,
    share: float,
    beside: torch.Tensor | None = None,
    correlation: float = 0.0,
) -> torch.Tensor:
    """Normal scores of `energy` [m], with as much of the samples' `score` as makes rows share `share`.

    Before that, with as much of `beside` [m] as gives them this `correlation` with it.
    """
    own = _scores(energy)
    if beside is not None and beside.any():
        beside = beside / beside.square().mean().sqrt()
        before = (own * beside).mean().clamp(-_MOST, _MOST)
        own = own + (correlation * ((1 - before**2) / (1 - correlation**2)).sqrt() - before) * beside
        own = own / own.square().mean().sqrt()
    count = len(score)
    sizes = torch.bincount(sample, minlength=count)
    pairs = (sizes * (sizes - 1)).sum().clamp_min(1)
    sums = torch.zeros(count, dtype=own.dtype, device=own.device).index_add_(0, sample, own)
    known = ((sums.square().sum() - own.square().sum()) / pairs / own.square().mean()).clamp_min(0)
    # Of a variance of 1 + w^2, known + w^2 is common.
    weight = ((share - known).clamp_min(0) / (1 - share)).sqrt()
    return own + weight * score[sample]


def _scores(values: torch.Tensor) -> torch.Tensor:
    """Normal scores [m], float64: what a standard normal has at the ranks of `values`."""
    place = torch.empty_like(values, dtype=torch.float64)
    place[values.argsort()] = torch.arange(len(values), dtype=place.dtype, device=place.device)
    return torch.special.ndtri((place + 0.5) / len(values))


def _own(values: torch.Tensor, sample: torch.Tensor, count: int) -> torch.Tensor:
    """`values` [m] less the mean of their sample."""
    sums = torch.zeros(count, dtype=values.dtype, device=values.device).index_add_(0, sample, values)
    return values - (sums / torch.bincount(sample, minlength=count).clamp_min(1))[sample]
