import pytest
import torch
from sweeps import sweep

from loka.core.error import sqnr_db
from loka.core.numerics.reference import dequantize, quantize
from loka.core.recipe import Cast, Format, Gemm, Granularity
from loka.measurement.operands import sides
from loka.statistics import gaussian, tails
from loka.statistics.draw import samplers
from loka.statistics.sample_coherence import SUMS, merge_samples, samples_of, with_samples

CPU = torch.device("cpu")
SAMPLES, ROWS = 64, 12
FIXED = torch.Generator().manual_seed(0)
PLACES = torch.randn(ROWS, 2, generator=FIXED)
TO_X, TO_G = torch.randn(2, 20, generator=FIXED), torch.randn(2, 10, generator=FIXED)


def positions(generator):
    """Of Wukong's kind: positions with means of their own, and the sample's p - y, heavy-tailed."""
    pull = torch.randn(SAMPLES, 1, 1, generator=generator).mul(0.7).exp()
    pull = pull * torch.randn(SAMPLES, 1, 1, generator=generator).sign()
    x = PLACES @ TO_X + 0.5 * torch.randn(SAMPLES, ROWS, 20, generator=generator)
    g = pull * (PLACES @ TO_G + 0.5 * torch.randn(SAMPLES, ROWS, 10, generator=generator))
    return x, g


def alike(generator):
    x = torch.randn(SAMPLES, 1, 20, generator=generator) + 0.5 * torch.randn(SAMPLES, ROWS, 20, generator=generator)
    g = torch.randn(SAMPLES, 1, 10, generator=generator) + 0.5 * torch.randn(SAMPLES, ROWS, 10, generator=generator)
    return x, g


def apart(generator, mean=0):
    x = 1 + torch.randn(SAMPLES, ROWS, 20, generator=generator)
    return x, mean + torch.randn(SAMPLES, ROWS, 10, generator=generator)


def around_one(generator):
    return apart(generator, mean=1)


def learn(batches, *, by_sample):
    x, g = (torch.cat(part).flatten(0, 1) for part in zip(*batches, strict=True))
    samples = samples_of(*batches[0])
    for batch in batches[1:]:
        samples = merge_samples(samples, samples_of(*batch))
    found = {
        name: tails.with_tails(
            gaussian.to_distribution(gaussian.gaussian_of(rows, full_covariance=64, rank=8)),
            tails.tails_of(rows),
            tails.cross_of(x, g) if name == "grad_output" else None,
        )
        for name, rows in (("input", x), ("grad_output", g))
    }
    if by_sample:
        found["grad_output"] = with_samples(found["grad_output"], samples)
    return found


def drawn(operands, count, rows=SAMPLES * ROWS):
    made, generator = samplers(operands, CPU), torch.Generator().manual_seed(1)
    return [(made["input"](rows, generator), made["grad_output"](rows, generator)) for _ in range(count)]


def coherence(batches):
    """sum_s |M_s|^2 / sum |g|^2 |x|^2: 1 for rows that are independent, T for rows that are the same."""
    total = sum(samples_of(x.reshape(-1, ROWS, x.shape[-1]), g.reshape(-1, ROWS, g.shape[-1])).sums for x, g in batches)
    named = dict(zip(SUMS, total.tolist(), strict=True))
    return named["coherent"] / named["energy"]


def error(batches, granularity):
    found = []
    for x, g in batches:
        layer = {"input": x.reshape(-1, x.shape[-1]), "grad_output": g.reshape(-1, g.shape[-1])}
        a, b = sides(Gemm.GRAD_WEIGHT, layer)
        cast = Cast(Format.E4M3, granularity)
        out = dequantize(quantize(a, cast)) @ dequantize(quantize(b, cast)).t()
        found.append(sqnr_db(out, a @ b.t()))
    return sum(found) / len(found)


def real(kind, seeds):
    return [kind(torch.Generator().manual_seed(seed)) for seed in seeds]


@pytest.mark.parametrize("kind", sweep([positions, alike], [alike]))
def test_samples_add_up_as_the_real_ones_do(kind):
    learnt, later = real(kind, range(16)), real(kind, range(100, 132))
    draws = drawn(learn(learnt, by_sample=True), 32)
    wanted = coherence(later)
    assert wanted > 3
    # Moving magnitudes to the tails takes some of what rows share, up to a tenth; the rest is chance.
    assert coherence(draws) == pytest.approx(wanted, rel=0.2)
    single = drawn(learn(learnt, by_sample=False), 32)
    assert coherence(single) < 0.5 * wanted
    for granularity in (Granularity.TENSOR, Granularity.GROUP_1X128):
        # Where samples add up along one direction with either sign, batches vary by 4 dB: 0.7 dB of a mean.
        assert error(draws, granularity) == pytest.approx(error(later, granularity), abs=1.4)
        assert error(single, granularity) < error(later, granularity) - 1.7


@pytest.mark.parametrize("kind", sweep([apart, around_one], [apart]))
def test_rows_that_have_nothing_in_common_but_a_mean_stay_apart(kind):
    """Few samples have many directions in which they add up by chance; they are not taken for real ones."""
    draws = drawn(learn(real(kind, range(1)), by_sample=True), 20)
    assert coherence(draws) == pytest.approx(coherence(real(kind, range(100, 120))), rel=0.1)


def test_rows_keep_their_moments_and_samples_share_energies():
    learnt = real(positions, range(24))
    x, g = (torch.cat(part) for part in zip(*drawn(learn(learnt, by_sample=True), 24), strict=True))
    for name, rows in (("x", x), ("g", g)):
        before = torch.cat([batch[name == "g"] for batch in learnt]).flatten(0, 1)
        spread = [v.t().cov().diagonal().log2() for v in (rows, before)]
        assert (spread[0] - spread[1]).abs().max() < 0.3  # half octaves of heavy tails
    energy = [v.reshape(-1, ROWS, 10).square().sum(dim=2).log2() for v in (g, torch.cat([b[1] for b in learnt]))]
    shares = [(e.mean(dim=1).var() / e.var()).item() for e in energy]
    assert shares[1] > 0.5
    assert shares[0] == pytest.approx(shares[1], abs=0.1)


def test_any_number_of_rows_is_drawn():
    """Samples begin with each draw; the last one of a draw may be cut short."""
    operands = learn(real(positions, range(4)), by_sample=True)
    for rows in (1, 5, ROWS + 1, 100):
        for x, g in drawn(operands, 2, rows):
            assert x.shape == (rows, 20)
            assert torch.isfinite(g).all()
    by_draw = drawn(operands, 40, ROWS)  # one sample in each
    assert coherence(by_draw) > 2


def test_gaussian_draws_do_not_change():
    learnt = real(positions, range(2))
    found = [
        samplers(learn(learnt, by_sample=by_sample), CPU, keep_tails=False)["grad_output"](
            9, torch.Generator().manual_seed(2)
        )
        for by_sample in (True, False)
    ]
    assert torch.equal(*found)
