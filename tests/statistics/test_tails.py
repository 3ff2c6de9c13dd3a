import math
from dataclasses import replace

import pytest
import torch

from loka.core.numerics.depth import depth_error
from loka.core.numerics.reference import dequantize, quantize
from loka.core.recipe import Cast, Format, Granularity
from loka.statistics import gaussian, tails
from loka.statistics.depths import depth_histogram
from loka.statistics.draw import sampler, samplers

CPU = torch.device("cpu")


def gradient_like(rows, columns, seed):
    fixed = torch.Generator().manual_seed(0)
    mixing = torch.randn(columns, columns, generator=fixed) / columns**0.5 + torch.eye(columns)
    scales = torch.randn(columns, generator=fixed).exp()
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator) @ mixing * scales
    values = values * torch.randn(rows, 1, generator=generator).exp()
    return values * (torch.rand(rows, columns, generator=generator) > 0.5)


def learn(batches):
    kept = gaussian.gaussian_of(batches[0], full_covariance=512, rank=8)
    sketch = tails.tails_of(batches[0])
    for batch in batches[1:]:
        kept = gaussian.merge(kept, gaussian.gaussian_of(batch, full_covariance=512, rank=8), rank=8)
        sketch = tails.merge_tails(sketch, tails.tails_of(batch))
    return tails.with_tails(gaussian.to_distribution(kept), sketch)


@pytest.mark.slow
def test_draws_have_the_depths_of_the_real_rows():
    # Drawn from the batches that they are compared with: the amax of such rows varies by octaves, and
    # what is to be shown is that the sketches keep what was seen.
    real = [gradient_like(512, 140, seed) for seed in range(1, 9)]
    learnt = learn(real)
    draws = {}
    for keep in (True, False):
        draw, generator = sampler(learnt, CPU, keep_tails=keep), torch.Generator().manual_seed(3)
        draws[keep] = [draw(512, generator) for _ in range(16)]
    for granularity in Granularity:
        errors = {}
        for what, batches in (("real", real), ("tails", draws[True]), ("gaussian", draws[False])):
            found = [depth_error(depth_histogram(b, granularity), Format.E4M3) for b in batches]
            means = [sum(getattr(e, name) for e in found) / len(found) for name in ("element", "underflow", "zeros")]
            errors[what] = torch.tensor(means)
        # Which draw gets the rare large rows is chance: 1.5 dB of an element's error, of which there are
        # 20 dB between one format's or granularity's and another's. Shares hold within 2 %.
        assert 10 * (errors["tails"][0] / errors["real"][0]).log10().abs() < 1.5
        torch.testing.assert_close(errors["tails"][1:], errors["real"][1:], atol=0.02, rtol=0)
        assert (errors["gaussian"] - errors["real"]).abs()[2] > 0.4  # zeros: a Gaussian has none


def test_sketches_merge_to_the_whole_and_leave_bad_rows_out():
    hp = gradient_like(300, 20, 1)
    merged = tails.merge_tails(tails.tails_of(hp[:120]), tails.tails_of(hp[120:]))
    whole = tails.tails_of(hp)
    assert torch.equal(merged.columns, whole.columns)
    assert torch.equal(merged.rows, whole.rows)
    spoiled = torch.cat([hp, torch.full((1, 20), math.nan), torch.full((1, 20), math.inf)])
    assert torch.equal(tails.tails_of(spoiled).columns, whole.columns)
    assert torch.equal(tails.tails_of(spoiled).rows, whole.rows)
    zeros = tails.tails_of(torch.zeros(5, 3))
    assert not tails.reshape(torch.randn(40, 3), zeros, torch.Generator().manual_seed(0)).any()
    with pytest.raises(ValueError, match="20 and 3 features"):
        tails.merge_tails(whole, zeros)


def test_cross_moments_merge_and_leave_bad_rows_out():
    generator = torch.Generator().manual_seed(0)
    x, g = torch.randn(90, 30, generator=generator), torch.randn(90, 12, generator=generator)
    spoiled = x.clone()
    spoiled[3, 1], spoiled_g = math.nan, g.clone()
    spoiled_g[50, 2] = math.inf
    merged = tails.merge_cross(tails.cross_of(spoiled[:40], g[:40]), tails.cross_of(x[40:], spoiled_g[40:]))
    kept = (torch.arange(90) != 3) & (torch.arange(90) != 50)
    assert merged.count == 88
    # Sums of 88 products of about 1 in float32.
    torch.testing.assert_close(merged.sum, g[kept].t() @ x[kept], rtol=1e-4, atol=1e-4)


def test_rows_drawn_together_have_the_covariances_of_the_real_ones():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 6, generator=generator) @ torch.randn(6, 6, generator=generator) + 2
    g = x @ torch.randn(6, 4, generator=generator) + torch.randn(4000, 4, generator=generator) - 1
    operands = {
        name: gaussian.to_distribution(gaussian.gaussian_of(rows, full_covariance=8, rank=8))
        for name, rows in (("input", x), ("grad_output", g))
    }
    kept, cross = operands["grad_output"], tails.cross_of(x, g)
    numbers = {**kept.numbers, tails.CROSS_COUNT: cross.count.item()}
    operands["grad_output"] = replace(kept, tensors={**kept.tensors, tails.CROSS: cross.sum}, numbers=numbers)
    made = samplers(operands, CPU)
    drawn, real = torch.cat([draw(20_000, generator) for draw in made.values()], dim=1), torch.cat([x, g], dim=1)
    # As of `test_draws_have_the_learnt_moments`, and a ridge of a thousandth.
    assert (drawn.T.cov() - real.T.cov()).norm() < 0.05 * real.T.cov().norm()
    # Nothing is handed out twice; of another number of rows grad_output stands alone.
    first, alone = made["grad_output"](20_000, generator), made["grad_output"](9000, generator)
    assert not torch.equal(first, drawn[:, 6:])
    assert (alone.T.cov() - g.T.cov()).norm() < 0.1 * g.T.cov().norm()


def test_statistics_without_tails_are_drawn_as_before():
    kept = gaussian.to_distribution(gaussian.gaussian_of(gradient_like(100, 8, 1), full_covariance=64, rank=4))
    assert tails.tails_in(kept) is None
    with_sketches = tails.with_tails(kept, tails.tails_of(gradient_like(100, 8, 1)))
    draws = [
        draw(50, torch.Generator().manual_seed(1))
        for draw in (
            sampler(kept, CPU),
            sampler(with_sketches, CPU, keep_tails=False),
            samplers({"input": kept}, CPU)["input"],
        )
    ]
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], draws[2])
    again = tails.tails_in(with_sketches)
    drawn = tails.reshape(draws[0], again, torch.Generator().manual_seed(1))
    assert not torch.equal(drawn, draws[0])
    cast = Cast(Format.E4M3, Granularity.ROW)
    assert torch.isfinite(dequantize(quantize(drawn, cast))).all()
