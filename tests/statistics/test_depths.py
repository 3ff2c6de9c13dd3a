from dataclasses import replace

import pytest
import torch
from torch import nn

from loka.core.error import sqnr_db
from loka.core.numerics.depth import depth_error
from loka.core.numerics.reference import dequantize, quantize
from loka.core.recipe import RECIPES, SHARED_OPERANDS, Gemm, Granularity
from loka.core.records.stats import Distribution, LinearStats, Stats
from loka.nn.linears import signature
from loka.statistics import depths
from loka.statistics.gaussian import gaussian_of, to_distribution


def heavy(rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(rows, columns, generator=generator)
    return z * (1.5 * torch.randn(1, columns, generator=generator)).exp() * torch.exp(z)


def layer_of(**operands):
    kept = {
        name: depths.with_depths(Distribution(kind="test"), depths.collect(hp, depths.layouts(name)))
        for name, hp in operands.items()
    }
    return LinearStats(
        rows=1,
        calls=1,
        order=0,
        dtype="float32",
        weight_dtype="float32",
        needs_input_grad=True,
        needs_weight_grad=True,
        operands=kept,
    )


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_every_operand_of_every_gemm_is_answered(recipe):
    tensors = {"input": heavy(150, 200), "weight": heavy(140, 200, 1), "grad_output": heavy(150, 140, 2)}
    layer = layer_of(**tensors)
    for gemm in Gemm:
        errors = depths.operand_errors(layer, gemm, recipe)
        casts = recipe.casts(gemm)
        assert len(errors) == (0 if casts is None else 2 - casts[0].centred)  # x - m is not kept in one
        for operand, error in errors.items():
            ((transposed, side),) = [
                (t, side) for t, (used_by, side) in enumerate(SHARED_OPERANDS[operand]) if used_by is gemm
            ]
            hp = tensors[operand].t() if transposed else tensors[operand]
            # Exact but for float32 rounding: tests/core/numerics/test_depth.py.
            assert error.sqnr_db == pytest.approx(sqnr_db(dequantize(quantize(hp, casts[side])), hp), abs=0.01)


def test_a_sample_of_rows_is_quantized_with_the_scales_of_the_whole():
    hp = heavy(400, 130)
    picked = torch.randint(400, (150,), generator=torch.Generator().manual_seed(1))
    picked = picked[picked != hp.abs().amax(dim=1).argmax()]  # the sample lacks the tensor's amax
    wanted = depths.layouts("input")
    assert {layout.granularity for layout in wanted} == set(Granularity)
    tables = depths.collect(hp, wanted, picked=picked)
    for cast in {cast for r in RECIPES.values() for cast in (r.output or ()) if not cast.centred}:
        whole = dequantize(quantize(hp, cast))
        kept = Distribution(kind="test", tensors=tables)
        error = depth_error(depths.histogram_of(kept, cast, transposed=False), cast.format)
        assert error.sqnr_db == pytest.approx(sqnr_db(whole[picked], hp[picked]), abs=0.01)
    for cast in {r.grad_weight[1] for r in RECIPES.values() if r.grad_weight}:
        whole = dequantize(quantize(hp.t(), cast)).t()
        error = depth_error(depths.histogram_of(kept, cast, transposed=True), cast.format)
        assert error.sqnr_db == pytest.approx(sqnr_db(whole[picked], hp[picked]), abs=0.01)


def test_batches_merge_and_memory_stays():
    wanted = depths.layouts("grad_output")
    batches = [heavy(64, 96, seed) for seed in range(3)]
    so_far = {}
    for batch in batches:
        so_far = depths.merge(so_far, depths.collect(batch, wanted))
    sizes = [sum(t.nbytes for t in found.values()) for found in (so_far, depths.collect(batches[0], wanted))]
    assert sizes[0] == sizes[1] < 400_000
    # Scales of rows know nothing of other batches, so the whole tells the same.
    whole = depths.collect(torch.cat(batches), wanted)
    torch.testing.assert_close(so_far["depth_row"], whole["depth_row"], rtol=1e-9, atol=1e-9)
    backwards = depths.merge(depths.collect(batches[2], wanted), depths.collect(batches[1], wanted))
    backwards = depths.merge(backwards, depths.collect(batches[0], wanted))
    for name, table in so_far.items():
        torch.testing.assert_close(backwards[name], table, rtol=1e-12, atol=0)


def test_weights_go_with_the_operand_as_it_lies():
    hp, weight = heavy(40, 50), torch.rand(50)
    tables = depths.collect(hp, depths.layouts("input"), weight=weight)
    assert tables["depth_row"].shape[1] == 10
    assert tables["depth_row_transposed"].shape[1] == 7
    with pytest.raises(ValueError, match="weights"):
        depths.merge(tables, depths.collect(hp, depths.layouts("input")))


def test_saved_statistics_keep_them(tmp_path):
    hp = heavy(30, 20)
    plain = to_distribution(gaussian_of(hp, full_covariance=64, rank=4))
    kept = depths.with_depths(plain, depths.collect(hp, depths.layouts("input")))
    other = to_distribution(gaussian_of(heavy(20, 20), full_covariance=64, rank=4))
    layer = replace(layer_of(), operands={"input": kept, "weight": other})
    stats = Stats(model=signature(nn.Linear(20, 20)), steps=1, sampled_steps=1, layers={"": layer})
    stats.save(tmp_path)
    again = Stats.load(tmp_path).layers[""].operands["input"]
    assert depths.depths_of(plain) == {}
    assert depths.depths_of(again).keys() == depths.depths_of(kept).keys()
    for name, table in depths.depths_of(kept).items():
        assert torch.equal(depths.depths_of(again)[name], table)
