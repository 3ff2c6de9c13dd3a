import math

import pytest
import torch

from loka.core.numerics import depth_tables
from loka.core.numerics.depth_tables import HIGHEST, LOWEST, NONFINITE, ROWS, TOP, ZEROS, Operand
from loka.core.numerics.reference import scale_of
from loka.core.recipe import Cast, Format, Granularity
from loka.statistics.depths import depth_histogram

ONE = torch.ones(1, 1)


def one_by_one(values, scale, weight=None):
    """The table of a `DepthHistogram` as its definition says it, element by element, in float64."""
    table = torch.zeros(ROWS, 7 if weight is None else 10, dtype=torch.float64)
    weights = torch.ones_like(values) if weight is None else weight.expand_as(values)
    for x, s, w in zip(
        values.flatten().tolist(), scale.expand_as(values).flatten().tolist(), weights.flatten().tolist(), strict=True
    ):
        if not math.isfinite(x) or not math.isfinite(s):
            table[NONFINITE, 0] += 1
            continue
        if x == 0:
            table[ZEROS, 0] += 1
            continue
        v = (torch.tensor(abs(x)) / torch.tensor(s)).item()
        exponent = min(max(math.frexp(v)[1] - 1, LOWEST), HIGHEST)
        m = max(v, 2.0**LOWEST) / 2.0**exponent
        row = (exponent - LOWEST) * 16 + min(int((m - 1) * 16), 15)
        centre = 1 + (row % 16 + 0.5) / 16
        if abs(v / 448 - 1) < 3e-7:
            row, centre, m = TOP, 1.75, 1.75
        offset = m - centre
        size = x * x / (m * m)
        terms = [size, 1 / (m * m), *([size * w] if weight is not None else [])]
        table[row, 0] += 1
        for at, term in enumerate(terms):
            table[row, 1 + 3 * at : 4 + 3 * at] += torch.tensor(
                [term, term * offset, term * offset**2], dtype=torch.float64
            )
    return table


def spread_out(rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(rows, columns, generator=generator) * torch.exp2(
        40 * torch.rand(rows, columns, generator=generator) - 36
    )
    z[:, ::7] = z[:, ::7].bfloat16().float()
    z[torch.rand(rows, columns, generator=generator) > 0.9] = 0
    return z


def assert_same(found, expected):
    assert torch.equal(found[:, 0], expected[:, 0])
    # r = 1 / v is rounded to float32 (6e-8), and offsets are at most 1/32 where m is 1 to 2: that is 4e-6 of
    # an offset, twice in its square; the moments of a bin are compared with what its S0 allows.
    slack = torch.tensor([1e-5, 1e-6, 1e-7], dtype=torch.float64)
    for first in range(1, expected.shape[1], 3):
        part, given = expected[:, first : first + 3], found[:, first : first + 3]
        assert bool(((given - part).abs() <= slack * part[:, :1].clamp_min(1e-300)).all())


def scales_of(values):
    amaxes = [values.abs().amax(1, keepdim=True), values.abs().amax().reshape(1, 1)] if values.numel() else [ONE]
    casts = [Cast(Format.E4M3, Granularity.ROW, power_of_two) for power_of_two in (False, True)]
    return [scale_of(amax, cast) for amax in amaxes for cast in casts]


@pytest.mark.parametrize("part", [1 << 20, 700])
@pytest.mark.parametrize("weighted", [False, True])
def test_tables_are_what_their_definition_says(part, weighted, monkeypatch):
    monkeypatch.setitem(depth_tables._PART, "cpu", part)  # several operands at a time; a few rows at a time
    many = [spread_out(*shape, seed) for seed, shape in enumerate(((9, 30), (1, 150), (0, 5), (12, 7), (4, 0)))]
    shapes = [values.shape[place % 2 :] for place, values in enumerate(many)]  # one for each element, or each column
    weights = [torch.rand(shape) + 0.1 if weighted else None for shape in shapes]
    operands = [
        Operand(values=values, scales=scales_of(values), weight=weight)
        for values, weight in zip(many, weights, strict=True)
    ]
    found = depth_tables.depth_tables(operands)
    for operand, tables in zip(operands, found, strict=True):
        assert tables.shape == (len(operand.scales), ROWS, 10 if weighted else 7)
        for table, scale in zip(tables, operand.scales, strict=True):
            assert_same(table, one_by_one(operand.values, scale, operand.weight))
    if weighted:
        only = depth_tables.depth_tables(operands, weighted_only=True)
        for some, tables in zip(only, found, strict=True):
            torch.testing.assert_close(some, tables[..., 7:], rtol=1e-12, atol=0)


def test_deterministic_algorithms_give_the_same():
    operand = Operand(values=spread_out(20, 30, 0), scales=scales_of(spread_out(20, 30, 0)))
    (expected,) = depth_tables.depth_tables([operand])
    torch.use_deterministic_algorithms(True)
    try:
        (found,) = depth_tables.depth_tables([operand])
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("steps", "is_amax"), [(-4, False), (-3, True), (-1, True), (1, True), (3, True)])
def test_float32_steps_about_the_amax_are_rounding(steps, is_amax):
    step = torch.tensor(448.0).view(torch.int32) + steps
    values = torch.stack([torch.tensor(448.0), step.view(torch.float32)]).view(1, 2)
    (tables,) = depth_tables.depth_tables([Operand(values=values, scales=[ONE])])
    assert tables[0, TOP, 0] == 1 + is_amax


def test_any_nan_spoils_its_group_and_no_other():
    bits = torch.tensor([0x7FC00000, 0x7FFFFFFF, 0x7F800001, -1, -0x400000], dtype=torch.int32)
    hp = torch.ones(7, 3)
    hp[:5, 1] = bits.view(torch.float32)
    hp[5, 1] = -math.inf
    hp[:, 2] = 0
    table = depth_histogram(hp, Granularity.ROW).table
    assert table[NONFINITE, 0] == 18
    assert (table[TOP, 0], table[ZEROS, 0]) == (2, 1)
    assert bool(table.isfinite().all())
