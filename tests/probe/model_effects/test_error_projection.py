import math
from dataclasses import replace

import pytest
import torch

from loka.core.numerics.centring import centre_of_rows, subtract
from loka.core.numerics.effect import Effect
from loka.core.numerics.hot_columns import append
from loka.core.numerics.reference import dequantize, quantize
from loka.core.recipe import RECIPES, Cast, Format, Granularity
from loka.probe.model_effects import error_projection as changes
from loka.probe.model_effects.error_projection import changes_of, effects_of, hot_of_rows

CASTS = (
    *(recipe.output for recipe in RECIPES.values() if recipe.output),
    (Cast(Format.E5M2, Granularity.ROW),) * 2,
    (Cast(Format.E4M3, Granularity.TENSOR, True),) * 2,
)


def heavy(*shape, seed):
    z = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    z[..., ::5] += 4  # columns to centre
    return z * z.abs()


@pytest.mark.parametrize("part", [1 << 24, 2000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_change_is_that_of_the_quantized_product(part, dtype, monkeypatch):
    monkeypatch.setattr(changes, "_PART", part)  # all recipes and samples at once; or one by one
    given, weight = heavy(140, 150, seed=0).to(dtype), heavy(20, 150, seed=1).to(dtype)
    grads = heavy(140, 20, seed=2).to(dtype)
    # Of these rows none has a number halfway between two of INT8, as one draw in four has in bfloat16: which is the
    # nearer one is then decided by a last bit.
    rows = torch.randperm(140, generator=torch.Generator().manual_seed(0))[:12].view(4, 3)
    found = changes_of(given, weight, grads, rows, CASTS)
    for at, (left, right) in enumerate(CASTS):
        m = centre_of_rows(given) if left.centred else torch.zeros(150)
        x = subtract(given, m)
        exact = x.double() @ weight.double().t()
        low_x, low_weight = quantize(x, left, padded=(140, 214)), quantize(weight, right, padded=(20, 214))
        if left.hot:
            columns = hot_of_rows(x, weight, grads[rows.flatten()], left.hot)
            append(low_x, x, columns)
            append(low_weight, weight, columns, second=True)
        low = dequantize(low_x).double() @ dequantize(low_weight).double().t()
        products = grads.double() * (low - exact)
        expected = products[rows].sum(dim=(1, 2))
        # float32 sums of 150 * 20 * 3 products; the error itself is 2^-4 of their size.
        size = (grads.double().abs() * (low.abs() + exact.abs()))[rows].sum(dim=(1, 2))
        assert bool(((found[:, at].double() - expected).abs() <= 1e-5 * size).all())
        if left.hot:  # what is left may drown in float32 sums: not what residuals gave back
            expected = expected - found[:, CASTS.index((replace(left, hot=0), replace(right, hot=0)))]
        assert bool((expected.abs() > 1e-4 * size).any())


def test_e5m2_of_rows_too_small_for_its_scale():
    given, weight = torch.full((2, 3), 1e-36), torch.ones(1, 3)
    cast = Cast(Format.E5M2, Granularity.ROW)
    found = changes_of(given, weight, torch.full((2, 1), 1e36), torch.tensor([[0], [1]]), [(cast, cast)])
    expected = 3 * (dequantize(quantize(given, cast))[0, 0].item() * 1e36 - 1)
    assert found[:, 0].tolist() == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.parametrize("signs", [False, True])
def test_effects_are_the_sums_over_samples(signs):
    s = heavy(2, 6, 3, seed=0)
    s[0, 1, 2], s[1, :, 0], s[0, 4, 1] = math.nan, math.inf, -math.inf
    predicted, signed = torch.rand(6, 2), torch.randn(6, 2) if signs else None
    found = effects_of(list(s), predicted, signed)
    for site, effects in zip(s, found, strict=True):
        for column, effect in zip(site.double().t(), effects, strict=True):
            pulls = None if signed is None else (signed * column.unsqueeze(1)).tolist()
            curvatures = None if signed is None else signed.double().square().tolist()
            expected = Effect.of((column.square() / 2).tolist(), predicted.tolist(), pulls, curvatures)
            assert (effect.count, effect.spread) == (expected.count, expected.spread)
            for name in ("total", "squares", "probabilities", "pulls", "curvatures"):
                assert getattr(effect, name) == pytest.approx(getattr(expected, name), rel=1e-6), name
    assert effects_of([], predicted, None) == []


def test_clusters_cost_what_their_sums_vary_by_with_a_factor_for_few():
    s, clusters = torch.tensor([[1.0], [2.0], [0.5], [3.0], [4.0], [3.5]]), torch.arange(6) // 2
    ((effect,),) = effects_of([s], torch.full((6, 1), 0.5), None, clusters)
    rest = s[:, 0].double().square() / 2
    rest = rest - rest.mean()
    cost = rest.view(3, 2).sum(1).square().sum() / rest.square().sum() * 3 / 2
    assert effect.spread == pytest.approx(6 * cost.item())
