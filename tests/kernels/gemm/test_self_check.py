import re
from dataclasses import replace

import pytest
import torch
from planted import BUGS, broken, neighbour, plant  # noqa: F401  (a fixture)

from loka.core.numerics.reference import Quantized, accumulation_bound, quantize, scaled_mm
from loka.core.problem import Problem
from loka.core.recipe import RECIPES, Cast, Format, Gemm, Granularity
from loka.kernels.gemm import self_check as module
from loka.kernels.gemm.adapters.emulated import EMULATED
from loka.kernels.gemm.registry import all_candidates, candidate_named
from loka.kernels.gemm.run import kernel_runs, reset_kernel_runs
from loka.kernels.gemm.self_check import compare, operands, self_check

CPU = torch.device("cpu")
SITES = [(recipe, gemm) for recipe in RECIPES.values() for gemm in Gemm if recipe.casts(gemm)]
IDS = [f"{recipe.name}-{gemm}" for recipe, gemm in SITES]


@pytest.mark.parametrize("gemm", list(Gemm))
@pytest.mark.parametrize("name", [candidate.name for candidate in all_candidates()])
def test_every_kernel_passes(name, gemm, device):
    if not module._problems(candidate_named(name), gemm, device):
        pytest.skip(f"{name} does not run {gemm} on {device}")
    reset_kernel_runs()
    assert self_check(name, gemm=gemm, device=device) is None
    assert not kernel_runs(), "what a self-check launches is no work of the user's"


@pytest.mark.parametrize(("recipe", "gemm"), SITES, ids=IDS)
def test_every_planted_bug_is_convicted(recipe, gemm, plant):  # noqa: F811
    a, b = operands(Problem(gemm=gemm, m=389, n=333, k=601, dtype="bfloat16", target="cpu"), CPU)
    casts = recipe.casts(gemm)
    right = quantize(a, casts[0]), quantize(b, casts[1])
    planted = 0
    for bug, wrong in BUGS.items():
        if not any(changed(*pair) for pair in zip(right, wrong(*right), strict=True)):
            continue  # one scale has no neighbour
        plant(broken(EMULATED, wrong, name="broken"))
        evidence = self_check(f"broken:{recipe.name}", gemm=gemm, device=CPU)
        assert evidence is not None, bug
        assert "outside the bound" in evidence, bug
        planted += 1
    assert planted >= 5


def changed(before, after):
    return not torch.equal(before.scale, after.scale) or not torch.equal(before.data.float(), after.data.float())


@pytest.mark.parametrize("shape", module._SIDES)
def test_neighbours_are_as_far_apart_as_the_docstring_says(shape):
    m, n, k = shape
    problem = Problem(gemm=Gemm.OUTPUT, m=m, n=n, k=k, dtype="bfloat16", target="cpu")
    a, b = operands(problem, CPU)

    def octaves(operand, granularity):
        scale = quantize(operand, Cast(Format.E4M3, granularity)).scale.log2()
        return scale.where(scale > -100, torch.nan)  # a zero group has no neighbours

    def nearest(gaps):
        return float(gaps.abs()[~gaps.isnan()].min())

    for operand in (a, b):
        assert nearest(octaves(operand, Granularity.ROW).diff(dim=0)) >= 1.0
        assert nearest(octaves(operand, Granularity.GROUP_1X128).diff(dim=0)) >= 1.0
        assert nearest(octaves(operand, Granularity.GROUP_1X128).diff(dim=1)) >= 2.9
        blocks = octaves(operand, Granularity.BLOCK_128X128)
        assert nearest(blocks.diff(dim=1)) >= 2.9
        assert nearest(blocks.diff(dim=0)) >= 2.1
        side = min(blocks.shape)
        square = blocks[:side, :side]
        gaps = (square - square.t())[~torch.eye(side, dtype=torch.bool)]
        assert nearest(gaps) >= 1.6
    parts = [a[:, i : i + 128].float() @ b[:, i : i + 128].float().t() for i in range(0, k, 128)]
    total = sum(part.abs() for part in parts)
    # Products of one output have one sign, but for the float32 rounding of their sum.
    torch.testing.assert_close((a.float() @ b.float().t()).abs(), total, rtol=1e-5, atol=0)
    for part in parts:
        share = (part.abs() / total)[(part != 0) & (total > 0)]
        assert share.min() >= 0.09
    rows_a = (a == 0).all(dim=1)
    assert rows_a[5]
    assert rows_a.sum() == 1
    assert (a[128:256, 128:256] == 0).all()


@pytest.mark.parametrize("shape", [*module._SIDES, max(module._OTHER_SIDES)])
@pytest.mark.parametrize(("fast", "largest"), [(True, 0.044), (False, 0.012)])
def test_the_bound_on_tensor_cores_is_what_the_docstring_says(shape, fast, largest):
    m, n, k = shape
    problem = Problem(gemm=Gemm.OUTPUT, m=m, n=n, k=k, dtype="bfloat16", target="sm_90")
    for granularity in Granularity:
        low_a, low_b = (quantize(hp, Cast(Format.E4M3, granularity)) for hp in operands(problem, CPU))
        right = scaled_mm(low_a, low_b, dtype=torch.float32).abs()
        bound = accumulation_bound(low_a, low_b, fast=fast, dtype=torch.bfloat16)
        assert (bound / right)[right > 0].max() <= largest
    for candidate in all_candidates():
        for cast in (cast for gemm in Gemm for cast in candidate.recipe.casts(gemm) or ()):
            alone = cast.granularity in (Granularity.TENSOR, Granularity.ROW)
            assert alone or not candidate.kernel.fast, "the margin of blocks is for float32 accumulation"


def test_inexact_sums_are_outside_the_bound(plant):  # noqa: F811
    """A sum kept in bfloat16 between blocks of K loses 2^-9 a block: more than one rounding."""

    def run(a, b, dtype, *, algorithm=0):
        total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.bfloat16)
        for start in range(0, a.shape[1], 32):
            part = slice(start, start + 32)
            row = Cast(Format.E4M3, Granularity.ROW)
            total += scaled_mm(
                Quantized(a.data[:, part], a.scale, row), Quantized(b.data[:, part], b.scale, row), dtype=dtype
            ).bfloat16()
        return total.to(dtype)

    plant(replace(EMULATED, name="coarse", run=run))
    assert "outside the bound" in str(self_check("coarse:rowwise_e4m3", gemm=Gemm.OUTPUT, device=CPU))


def damaged(change):
    def run(a, b, dtype, *, algorithm=0):
        return change(scaled_mm(a, b, dtype=dtype))

    return run


def poke(out, where, value):
    out[where] = value
    return out


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (lambda out: poke(out, (7, 9), float("nan")), "1 of .* got nan.* 1 are not finite"),
        (lambda out: poke(out, (7, 9), float("inf")), "got inf"),
        (lambda out: poke(out, (slice(128, None), slice(None)), 0.0), "as if never written"),
        (lambda out: poke(out, (5, 3), 0.5), r"1 of .* at \[5, 3\]: got 0.5, expected -?0 \+- 0"),
        (lambda out: out * 2, "all are off by one factor: a tensor scale"),
        (
            lambda out: torch.cat([out[:, :256], out[:, 256:] * out[:, 256:].double().sqrt().to(out)], dim=1),
            "only in columns 256 to",
        ),
        (lambda out: out.t(), r"the result is torch.bfloat16 \(272, 132\), not torch.bfloat16 \(132, 272\)"),
        (lambda out: out.double(), "the result is torch.float64"),
    ],
    ids=["nan", "inf", "unwritten", "zero row", "factor", "columns", "transposed", "dtype"],
)
def test_the_evidence_says_what_it_looks_like(change, shown, plant):  # noqa: F811
    plant(replace(EMULATED, name="damaged", run=damaged(change)))
    evidence = self_check("damaged:tensorwise_e4m3", gemm=Gemm.OUTPUT, device=CPU)
    assert re.search(shown, evidence), evidence


def test_scales_of_rows_and_columns_are_recognised(plant):  # noqa: F811
    for bug, shown in (("A", "each row is off"), ("B", "each column is off")):
        plant(broken(EMULATED, BUGS[f"{bug}'s scales from the neighbouring row"], name="broken"))
        assert shown in str(self_check("broken:rowwise_e4m3", gemm=Gemm.OUTPUT, device=CPU))


def test_an_exception_is_evidence_but_a_full_gpu_is_not(plant):  # noqa: F811
    def raising(error):
        def run(a, b, dtype, *, algorithm=0):
            raise error

        return run

    plant(replace(EMULATED, name="angry", run=raising(RuntimeError("invalid argument\nat line 3"))))
    evidence = self_check("angry:rowwise_e4m3", gemm=Gemm.OUTPUT, device=CPU)
    assert evidence == "M=132 N=272 K=384 bfloat16: it raised RuntimeError: invalid argument"
    plant(replace(EMULATED, name="full", run=raising(torch.OutOfMemoryError("full"))))
    with pytest.raises(torch.OutOfMemoryError):
        self_check("full:rowwise_e4m3", gemm=Gemm.OUTPUT, device=CPU)


def test_a_wrong_quantizer_is_convicted():
    a, _ = operands(Problem(gemm=Gemm.OUTPUT, m=132, n=272, k=384, dtype="float32", target="cpu"), CPU)
    right = quantize(a, Cast(Format.E4M3, Granularity.GROUP_1X128))
    assert module._quantizer_evidence("A", a, right) is None
    found = module._quantizer_evidence("A", a, neighbour(right, 1))
    assert "wrong for operand A (e4m3_group_1x128)" in found


def test_wrong_residuals_are_convicted(monkeypatch, plant):  # noqa: F811
    right = module.append_residuals
    monkeypatch.setattr(module, "append_residuals", lambda *given, second: right(*given, second=not second))
    plant(replace(EMULATED, name="swapped"))
    assert "residuals differ" in self_check("swapped:rowwise_e4m3_hot32", gemm=Gemm.OUTPUT, device=CPU)


@pytest.mark.parametrize(
    ("gemm", "turned"),
    [(Gemm.OUTPUT, (False, False)), (Gemm.GRAD_INPUT, (False, True)), (Gemm.GRAD_WEIGHT, (True, True))],
)
def test_operands_lie_as_a_linear_layer_passes_them(gemm, turned):
    made = operands(Problem(gemm=gemm, m=132, n=272, k=384, dtype="float32", target="cpu"), CPU)
    assert tuple(operand.stride(0) == 1 for operand in made) == turned


def test_other_shapes_are_tried_where_the_usual_ones_do_not_fit(plant):  # noqa: F811
    seen = []

    def picky(problem, recipe):
        return None if problem.m <= 4 and problem.dtype == "bfloat16" else "M is above 4"

    def run(a, b, dtype, *, algorithm=0):
        seen.append((a.shape, dtype))
        return scaled_mm(a, b, dtype=dtype)

    plant(replace(EMULATED, name="few", unsupported=picky, run=run))
    assert self_check("few:rowwise_e4m3", gemm=Gemm.OUTPUT, device=CPU) is None
    assert seen == [((1, 384), torch.bfloat16)]
    plant(replace(EMULATED, name="none", unsupported=lambda problem, recipe: "never", run=run))
    with pytest.raises(AssertionError, match="runs no output on cpu that the self-check knows"):
        self_check("none:rowwise_e4m3", gemm=Gemm.OUTPUT, device=CPU)


def test_it_runs_once(plant):  # noqa: F811
    calls = []

    def run(a, b, dtype, *, algorithm=0):
        calls.append(algorithm)
        return scaled_mm(a, b, dtype=dtype)

    plant(replace(EMULATED, name="counted", run=run))
    for _ in range(3):
        assert self_check("counted:rowwise_e4m3", gemm=Gemm.OUTPUT, device="cpu") is None
    assert calls == [0] * 4, "two shapes in two dtypes"
    assert self_check("counted:rowwise_e4m3@3", gemm=Gemm.OUTPUT, device="cpu") is None
    assert calls == [0] * 4 + [3] * 4


def test_compare_is_elementwise():
    expected = torch.tensor([[1.0, 2.0], [0.0, 4.0]])
    bound = torch.tensor([[0.1, 0.1], [0.0, 0.1]])
    assert compare(expected + torch.tensor([[0.1, -0.09], [0.0, 0.05]]), expected, bound + 1e-6) is None
    assert "[1, 1]: got 4.5, expected 4 +- 0.1" in str(
        compare(expected + torch.tensor([[0.0, 0.2], [0.0, 0.5]]), expected, bound)
    )
