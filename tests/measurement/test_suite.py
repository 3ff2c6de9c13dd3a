import math

import pytest
import torch

from loka.core.problem import linear_problem
from loka.core.recipe import Gemm
from loka.core.records.gemm_bench import joined
from loka.core.records.stats import Stats
from loka.measurement.operands import rotated_operands
from loka.measurement.rerace import layer_call, site_call
from loka.measurement.suite import bytes_needed, suite_of, suite_stats
from loka.statistics.draw import normal, sampler
from loka.zoo.shapes import GemmShape, lrm_gemm_shapes

CPU = torch.device("cpu")
GIB = 1 << 30


def shape(model, site, m, k, n, *, kind="linear", count=1):
    return GemmShape(model=model, site=site, kind=kind, batch=1, m=m, k=k, n=n, count=count)


def test_equal_shapes_are_one_layer_with_all_its_names():
    suite = suite_of(
        [
            shape("A (x)", "FC 8->16", 4, 8, 16, count=2),
            shape("B", "other", 4, 8, 16, count=3),
            shape("A (x)", "FC 8->16", 5, 8, 16),
            shape("A (x)", "pairs", 4, 8, 16, kind="bmm"),
            shape("A (x)", "pairs", 9, 8, 16, kind="bmm"),
        ],
        memory=16 * GIB,
    )
    assert list(suite.layers) == ["a_x/fc_8x16", "a_x/fc_8x16_2"]
    merged = suite.layers["a_x/fc_8x16"]
    assert [(use.model, use.count) for use in merged.uses] == [("A (x)", 2), ("B", 3)]
    assert merged.count == 5
    assert merged.gflop == pytest.approx(2 * 4 * 8 * 16 / 1e9)
    assert list(suite.not_covered) == ["A (x): pairs", "A (x): pairs (2)"]


def test_what_does_not_fit_is_named_with_its_need():
    listed = [shape("A", "small", 64, 64, 64), shape("A", "large", 2048, 147840, 16384)]
    suite = suite_of(listed, memory=80 * GIB)
    assert list(suite.layers) == ["a/small"]
    assert suite.too_large == {"A: large": "2048x147840x16384 needs about 73 GiB, this device has 80 GiB"}
    assert len(suite_of(listed, memory=141 * GIB).layers) == 2
    assert bytes_needed(2048, 147840, 16384, "float32") > bytes_needed(2048, 147840, 16384)


def test_the_whole_suite_fits_an_h200():
    suite = suite_of(lrm_gemm_shapes(), memory=139 * GIB)
    assert len(suite.layers) == 71
    assert sum(len(layer.uses) for layer in suite.layers.values()) == 99
    assert len(suite.not_covered) == 31
    assert not suite.too_large
    for path in suite.layers:
        assert not set(path) & set("*?[] "), "a path must not be a pattern, or need quotes"


def test_statistics_draw_operands_of_the_true_sizes(tmp_path):
    suite = suite_of([shape("A", "fc", 300, 40, 50)], memory=16 * GIB)
    suite_stats(suite, weight_dtype="float32").save(tmp_path)
    layer = Stats.load(tmp_path).layers["a/fc"]
    (operands, *_) = rotated_operands(layer, device=CPU, seed=0)
    assert {name: tuple(tensor.shape) for name, tensor in operands.items()} == {
        "input": (300, 40),
        "weight": (50, 40),
        "grad_output": (300, 50),
    }
    assert operands["weight"].dtype == torch.float32
    assert operands["input"].dtype == operands["grad_output"].dtype == torch.bfloat16
    assert operands["weight"].std().item() == pytest.approx(40**-0.5, rel=0.1)
    assert operands["grad_output"].float().square().mean().sqrt().item() == pytest.approx(1e-4, rel=0.3)


def test_normal_numbers_with_scales_by_feature():
    draw = sampler(normal(2000, std=2.0, spread=0.5, seed=1), CPU)
    values = draw(400, torch.Generator().manual_seed(0))
    again = draw(400, torch.Generator().manual_seed(9))
    scales, others = values.std(dim=0).log(), again.std(dim=0).log()
    assert values.mean().item() == pytest.approx(0.0, abs=0.05)
    # Log-normal of spread 0.5, and 1 / sqrt(2 * 400) of noise from 400 rows.
    assert scales.std().item() == pytest.approx(math.hypot(0.5, 1 / math.sqrt(800)), rel=0.05)
    assert values.square().mean().item() == pytest.approx(4.0, rel=0.1), "the mean square stays std^2"
    assert torch.corrcoef(torch.stack([scales, others]))[0, 1] > 0.98, "a feature keeps its scale"
    flat = sampler(normal(2000), CPU)(400, torch.Generator().manual_seed(0))
    assert flat.std(dim=0).log().std().item() == pytest.approx(1 / math.sqrt(800), rel=0.1)


def test_what_races_is_the_gemm_of_the_site_and_of_the_layer():
    suite = suite_of([shape("A", "fc", 40, 32, 48)], memory=16 * GIB)
    layer = suite_stats(suite, weight_dtype="float32").layers["a/fc"]
    (operands,) = rotated_operands(layer, device=CPU, seed=0)[:1]
    x, weight, dy = (operands[name].float() for name in ("input", "weight", "grad_output"))
    expected = {Gemm.OUTPUT: x @ weight.t(), Gemm.GRAD_INPUT: dy @ weight, Gemm.GRAD_WEIGHT: dy.t() @ x}
    rowwise = "emulated:rowwise_e4m3"
    candidates = {Gemm.OUTPUT: rowwise, Gemm.GRAD_INPUT: "hp", Gemm.GRAD_WEIGHT: "emulated:tensorwise_e4m3"}
    together = layer_call(joined({gemm.value: name for gemm, name in candidates.items()}), [operands])()
    in_hp = layer_call("hp", [operands])()
    for index, (gemm, product) in enumerate(expected.items()):
        problem = linear_problem(gemm, rows=40, in_features=32, out_features=48, dtype="bfloat16", target="cpu")
        scale = product.square().mean().sqrt()
        for name, least, most in ((rowwise, 1e-2, 6e-2), ("hp", 0.0, 6e-3)):
            out = site_call(name, [operands], problem)()
            error = ((out.float() - product).square().mean().sqrt() / scale).item()
            assert least <= error <= most, (gemm, name)
        torch.testing.assert_close(in_hp[index].float(), product, rtol=2e-2, atol=1e-2 * scale.item())
        error = ((together[index].float() - product).square().mean().sqrt() / scale).item()
        low = candidates[gemm] != "hp"
        assert (1e-2 if low else 0.0) <= error <= (6e-2 if low else 6e-3)


def test_hot_candidates_race_with_residuals():
    layer = suite_stats(suite_of([shape("A", "fc", 40, 64, 48)], memory=16 * GIB)).layers["a/fc"]
    sets, names = rotated_operands(layer, device=CPU, seed=0)[:1], ("", "_hot32", "_centred_hot32")
    problem = linear_problem(Gemm.OUTPUT, rows=40, in_features=64, out_features=48, dtype="bfloat16", target="cpu")
    plain, hot, both = (site_call(f"emulated:rowwise_e4m3{name}", sets, problem)() for name in names)
    assert torch.equal(hot, both)
    assert not torch.equal(hot, plain)
    layer = layer_call(joined({"output": "emulated:rowwise_e4m3_hot32", "grad_input": "hp", "grad_weight": "hp"}), sets)
    assert torch.equal(layer()[0], hot)
