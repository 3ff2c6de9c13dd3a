import math

import pytest
import torch

from loka.core.numerics.reference import expand_scale, quantize, scale_of
from loka.core.recipe import Cast, Format, Granularity
from loka.statistics.depth_scales import sample_scales, sides_of

SHAPES = ((300, 200), (256, 128), (128, 300), (1, 5), (5, 1), (129, 27))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("picks", [False, True])
def test_every_element_gets_the_scale_of_its_group(shape, dtype, picks):
    hp = torch.randn(shape, generator=torch.Generator().manual_seed(0)).exp().to(dtype).t().contiguous().t()
    picked = torch.tensor([0, shape[0] - 1, shape[0] // 2, 0]) if picks else None
    kinds, expected = [], []
    for granularity in Granularity:
        for transposed in (False, True):
            for power_of_two in (False, True):
                kinds.append((sides_of(granularity, shape, transposed=transposed), power_of_two))
                cast = Cast(Format.E4M3, granularity, power_of_two)
                oriented = hp.t() if transposed else hp
                scale = expand_scale(quantize(oriented, cast).scale, cast, *oriented.shape).expand(oriented.shape)
                whole = scale.t() if transposed else scale
                expected.append(whole if picked is None else whole[picked])
    sample = hp if picked is None else hp[picked]
    found = sample_scales(hp, sample, picked, list(dict.fromkeys(kinds)))
    by_kind = dict(zip(dict.fromkeys(kinds), found, strict=True))
    for kind, scale in zip(kinds, expected, strict=True):
        assert torch.equal(by_kind[kind].expand(sample.shape), scale)


@pytest.mark.parametrize("value", [1.0, 448.0, 448 * 2.0**-40, 449.0, 1e-44, 0.0, 3e38])
def test_powers_of_two_as_the_reference_rounds_them(value):
    hp = torch.full((2, 3), value)
    (found,) = sample_scales(hp, hp, None, [((2, 3), True)])
    assert found.item() == scale_of(torch.tensor(value), Cast(Format.E4M3, Granularity.TENSOR, True)).item()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_group_with_nan_has_no_scale_and_others_do(value):
    hp = torch.ones(3, 4)
    hp[1, 2] = value
    for power_of_two in (False, True):
        rows, columns = sample_scales(hp, hp, None, [((1, 4), power_of_two), ((3, 1), power_of_two)])
        assert rows.isnan().flatten().tolist() == [False, True, False]
        assert columns.isnan().flatten().tolist() == [False, False, True, False]
