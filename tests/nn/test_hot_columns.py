"""Hot recipes: columns from the probe; measured, planned, converted, refused, watched."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import loka
from loka.compiler.joint_sites import unjoined
from loka.core.exceptions import NoKernelFits, NotConverted, ServeRefused
from loka.core.numerics.centring import centre_of_rows, restore, subtract
from loka.core.recipe import Gemm, recipe_named
from loka.core.records.drift import drift
from loka.kernels.gemm.registry import candidate_named
from loka.kernels.gemm.run import kernel_runs, reset_kernel_runs, run_gemm
from loka.measurement.operands import hot_of_input
from loka.measurement.predicted_kl import depth_kl
from loka.measurement.settings import Settings
from loka.serve.sites import scale_source
from loka.statistics.effect_depths import shares_of
from loka.train.automatic.joint_effect import emulated, joint_effect

HOT, PLAIN, TORCH = "emulated:rowwise_e4m3_hot32", "emulated:rowwise_e4m3", "torch:rowwise_e4m3_hot32"
BOTH = "emulated:rowwise_e4m3_centred_hot32"
NAMES = ("rowwise_e4m3", "rowwise_e4m3_hot32", "rowwise_e4m3_centred_hot32")
WIDTH = 96
PLANTED = torch.arange(1, WIDTH, 3)  # 32 columns


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 80), nn.ReLU(), nn.Linear(80, 48), nn.Tanh(), nn.Linear(48, 1))


def rows(count: int = 256, hot: torch.Tensor = PLANTED) -> torch.Tensor:
    x = torch.randn(count, WIDTH)
    x[:, hot] = 8 * x[:, hot] + 4
    return x / 8


def probed(model: nn.Module, hot: torch.Tensor = PLANTED, steps: int = 8) -> loka.Stats:
    with loka.Probe(model, every=1) as probe:
        for _ in range(steps):
            nn.functional.softplus(-model(rows(hot=hot))).mean().backward()
    model.zero_grad()
    return probe.stats()


@pytest.fixture(scope="module")
def case() -> tuple[nn.Module, loka.Stats, loka.Report]:
    model = model_of()
    stats = probed(model)
    names = [HOT, PLAIN, TORCH, BOTH]
    report = loka.measure(
        stats, device="cpu", candidates=names, errors_only=True, settings=Settings(max_draws=4)
    )
    return model, stats, report


def test_the_probe_finds_them(case: tuple[nn.Module, loka.Stats, loka.Report]) -> None:
    _, stats, report = case
    for recipe in map(recipe_named, NAMES[1:]):
        columns = hot_of_input(stats.layers["0"], recipe)
        assert columns.tolist() == PLANTED.tolist() == list(report.hot_columns["0"][recipe.name])
        of_input, of_weight = shares_of(stats.layers["0"], recipe.output[0], columns)
        assert of_input > 0.95 < of_weight  # 64 times the energy in a third of the columns
    assert hot_of_input(stats.layers["0"], recipe_named("rowwise_e4m3")) is None


def test_what_the_probe_predicts_is_what_it_does(case: tuple[nn.Module, loka.Stats, loka.Report]) -> None:
    """KL/H by a pass, by histograms, and in truth, within what holds of FP8 by row (nn/test_centring.py)."""
    model, stats, report = case
    torch.manual_seed(5)
    x = rows(4096)
    with torch.no_grad():
        z = model(x).double()
        p = z.sigmoid()
        q = float(p.mean())
        entropy = -(q * math.log(q) + (1 - q) * math.log1p(-q))
        for path in ("0", "2"):
            layer, found = stats.layers[path], {}
            for name in NAMES:
                if name not in report.hot_columns[path] and name != "rowwise_e4m3":
                    continue
                columns = {path: report.hot_columns[path].get(name, ())}
                with emulated(model, {path: f"emulated:{name}"}, stats.model.layers, report.centres, columns):
                    low = model(x).double()
                actual = (0.5 * p * (1 - p) * (low - z).square()).mean().item() / entropy
                found[name] = layer.effects[name].kl().value
                assert found[name] == pytest.approx(actual, rel=0.35), (path, name)
                assert depth_kl(layer, recipe_named(name).output) == pytest.approx(actual, rel=0.7)
            assert found["rowwise_e4m3_hot32"] < (0.1 if path == "0" else 0.8) * found["rowwise_e4m3"]


def test_planned_converted_and_back(
    case: tuple[nn.Module, loka.Stats, loka.Report], tmp_path: object
) -> None:
    model, _, report = case
    at_first = report.sites["0/output"].measurements
    assert at_first[HOT].errors["sqnr_db"].value > at_first[PLAIN].errors["sqnr_db"].value + 6
    assert "does not define" in report.sites["0/grad_weight"].measurements[HOT].unsupported
    assert "64 more than it has" in report.sites["4/output"].measurements[HOT].unsupported
    report.save(tmp_path / "report.json")
    assert loka.Report.load(tmp_path / "report.json").hot_columns == report.hot_columns
    chosen = {"0/output": TORCH, "2/output": BOTH, "*/output": "hp"}
    plan = loka.plan(report, loka.Budget(ne=1e-3))
    assert "_hot32" in plan.decisions["0/output"].candidate
    plan = loka.plan(report, force=chosen)
    assert PLAIN in plan.candidates("0").values()  # backward is as it was
    plan.save(tmp_path / "plan.json")
    plan = loka.Plan.load(tmp_path / "plan.json")
    assert {path: len(columns) for path, columns in plan.hot_columns.items()} == {"0": 32, "2": 32}
    converted = loka.convert(copy.deepcopy(model), plan)
    assert converted.state_dict().keys() == model.state_dict().keys()
    x = rows().requires_grad_()
    reset_kernel_runs()
    y = converted[0](x)
    assert kernel_runs() == {(TORCH, "output"): 1}
    columns = torch.tensor(plan.hot_columns["0"])
    weight, bias = model[0].weight.detach(), model[0].bias.detach()
    twin = run_gemm(HOT, x.detach(), weight, gemm=Gemm.OUTPUT, dtype=torch.float32, hot=columns) + bias
    assert torch.allclose(y, twin, rtol=1e-5, atol=1e-5)
    low = loka.convert(copy.deepcopy(model), loka.plan(report, force={**chosen, "0/output": PLAIN}))
    dy = torch.randn(256, 80)
    grads = []
    for each in (converted, low):
        given = x.detach().requires_grad_()
        each[0](given).backward(dy)
        grads.append((given.grad, each[0].weight.grad))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*grads, strict=True))
    compiled = torch.compile(converted, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), converted(x), rtol=1e-5, atol=1e-6)
    assert f"{HOT} is none of" in unjoined(HOT)  # by site only
    middle = converted[1](converted[0](x)).detach()
    m = torch.tensor(plan.centres["2"])
    inner = run_gemm(
        HOT,
        subtract(middle, m),
        model[2].weight.detach(),
        gemm=Gemm.OUTPUT,
        dtype=torch.float32,
        hot=torch.tensor(plan.hot_columns["2"]),
    )
    expected = restore(inner, m, model[2].weight.detach()) + model[2].bias.detach()
    assert torch.allclose(converted[2](middle), expected, rtol=1e-5, atol=1e-5)
    reverted = loka.revert(converted)
    effect = joint_effect(model, plan, [rows(1024)], forward=lambda model, x: model(x))
    assert effect.measured.value == pytest.approx(effect.predicted.value, rel=0.35)
    assert torch.equal(reverted[0](x), model[0](x))


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ((), "0 are there among 0"),
        (tuple(range(31)), "31 are there among 31"),
        ((0, *range(31)), "31 are there among 32"),
        (tuple(range(WIDTH - 16, WIDTH + 16)), "16 are there among 32"),
        (tuple(range(-1, 31)), "31 are there among 32"),
    ],
)
def test_a_plan_without_its_columns_is_refused(
    case: tuple[nn.Module, loka.Stats, loka.Report], columns: tuple[int, ...], said: str
) -> None:
    plan = loka.plan(case[2], force={"0/output": HOT, "*": "hp"})
    model = model_of()
    with pytest.raises(NotConverted, match=f"needs 32 of its 96 columns, and {said}"):
        loka.convert(model, replace(plan, hot_columns={"0": columns}))
    assert "forward" not in model[0].__dict__


def test_refused_where_nothing_tells_and_where_it_is_served(
    case: tuple[nn.Module, loka.Stats, loka.Report],
) -> None:
    stats = case[1]
    layer = stats.layers["0"]
    given = layer.operands["input"]
    tensors = {name: table for name, table in given.tensors.items() if "effect_columns" not in name}
    bare = replace(layer, operands={**layer.operands, "input": replace(given, tensors=tensors)}, effects={})
    report = loka.measure(
        replace(stats, layers={"0": bare}), device="cpu", candidates=[HOT, PLAIN], errors_only=True
    )
    assert "which columns are hot is not known" in report.sites["0/output"].measurements[HOT].unsupported
    assert not report.hot_columns
    assert depth_kl(bare, recipe_named(NAMES[1]).output) is None
    with pytest.raises(NoKernelFits, match="not known"):
        loka.plan(report, force={"0/output": HOT})
    with pytest.raises(ServeRefused, match="plan again without hot recipes"):
        scale_source(HOT)
    with pytest.raises(ServeRefused, match="plan again without centred recipes"):
        scale_source(BOTH)
    assert "nobody measured" in candidate_named(HOT).on_request


def test_columns_that_moved_are_seen(case: tuple[nn.Module, loka.Stats, loka.Report]) -> None:
    model, stats, report = case
    for name in (HOT, BOTH):
        plan = loka.plan(report, force={"0/output": name, "*": "hp"})
        assert not drift(plan, probed(copy.deepcopy(model)), before=stats).layers["0"].unsafe
        moved = drift(plan, probed(copy.deepcopy(model), PLANTED - 1), before=stats).layers["0"]
        assert any("its hot columns moved: they hold" in reason for reason in moved.unsafe)


def test_centred_rows_have_columns_of_their_own() -> None:
    """Means of 8 make 32 columns hot that are cold without them."""
    model, planted = model_of(), PLANTED - 1
    with loka.Probe(model, every=1) as probe:
        for _ in range(4):
            x = rows()
            x[:, planted] += 8
            nn.functional.softplus(-model(x)).mean().backward()
    layer = probe.stats().layers["0"]
    found = [hot_of_input(layer, recipe_named(name)).tolist() for name in NAMES[1:]]
    assert found == [planted.tolist(), PLANTED.tolist()]
    assert not centre_of_rows(rows())[planted].any()
