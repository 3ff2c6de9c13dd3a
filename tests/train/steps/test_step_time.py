import dataclasses
import functools
import gc
import weakref

import pytest
import torch
from command_line import measure_coarsely
from torch import nn
from typer.testing import CliRunner

from loka.cli.app import app
from loka.cli.commands import step
from loka.core.error import Estimate
from loka.core.storage.files import read_record
from loka.core.timing import Race, Timing
from loka.data import SyntheticClicks
from loka.train.steps import step_time
from loka.train.steps.blocks import compiled, uncompiled
from loka.train.steps.step_time import Arm, StepTime, time_steps
from loka.zoo import build

CPU = torch.device("cpu")
ONE = Estimate(1.0, 1.0, 1.0)


@pytest.fixture
def losses(monkeypatch):
    found = []

    def race(functions, **options):
        found.append({name: float(function().detach()) for name, function in functions.items()})
        timing = Timing(microseconds=ONE, speedup=ONE, rounds=9)
        timings = dict.fromkeys(functions, timing)
        return Race(timings=timings, samples={}, winner="", rounds=9, ended="decided")

    monkeypatch.setattr(step_time, "time_interleaved", race)
    monkeypatch.setattr(step_time, "has_graphs", lambda device: True)
    return found


def wukong():
    torch.manual_seed(0)
    source = SyntheticClicks(rows=64, seed=0)
    return build("wukong", dense_features=source.dense_features, vocab_sizes=source.vocab_sizes)


def test_a_step_is_that_of_training_but_for_the_tables(losses):
    batch = next(iter(SyntheticClicks(rows=64, seed=0).batches(32)))
    built = []

    def make():
        built.append(wukong())
        return built[-1]

    time_steps(Arm(name="bf16", build=make), {}, batch, device=CPU, compile_blocks=False)
    plain = wukong()
    with torch.autocast("cpu", torch.bfloat16):
        logits = plain(batch.dense, batch.sparse)
    loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), batch.label)
    loss.backward()
    assert losses == [{"bf16": float(loss.detach()), "again": float(loss.detach())}]
    expected = dict(plain.named_parameters())
    for name, parameter in built[0].named_parameters():
        if "table" in name:
            assert parameter.grad is None
        else:
            assert torch.equal(parameter.grad, expected[name].grad), name


@pytest.mark.slow
def test_an_arm_that_fails_is_a_result_and_the_others_go_on(losses):
    batch = next(iter(SyntheticClicks(rows=64, seed=0).batches(8)))

    def broken():
        raise RuntimeError("no such kernel\nand more")

    told = []
    arms = {"broken": Arm(name="broken", build=broken), "other": Arm(name="other", build=wukong, count=lambda model: 7)}
    base = Arm(name="bf16", build=wukong)
    found = time_steps(base, arms, batch, device=CPU, compile_blocks=False, on_result=told.append)
    assert list(found) == ["bf16", "broken", "other"]
    assert [result.name for result in told] == ["bf16", "broken", "other"]
    assert found["broken"].failure == "RuntimeError: no such kernel"
    assert found["other"].low_precision == 7
    assert list(losses[-1]) == ["bf16", "other"], "each arm races against the baseline alone"


def test_the_looked_up_rows_get_the_gradient_of_training(losses, monkeypatch):
    """The race calls the step twice, on the same rows: gradients are those of one call, bit for bit."""
    batch = next(iter(SyntheticClicks(rows=64, seed=0).batches(32)))
    rows = []

    def keep(module, args, output):
        output.retain_grad()
        rows.append(output)

    model, plain = wukong(), wukong()
    race = step_time.time_interleaved

    def watched(*args, **options):
        model.front.embeddings.table.register_forward_hook(keep)  # after the hook of the timed step
        return race(*args, **options)

    monkeypatch.setattr(step_time, "time_interleaved", watched)
    time_steps(Arm(name="bf16", build=lambda: model), {}, batch, device=CPU, compile_blocks=False)
    plain.front.embeddings.table.register_forward_hook(keep)
    with torch.autocast("cpu", torch.bfloat16):
        logits = plain(batch.dense, batch.sparse)
    nn.functional.binary_cross_entropy_with_logits(logits.float(), batch.label).backward()
    first, again, expected = rows
    assert first.shape == (*batch.sparse.shape, 16)
    assert expected.grad.any()
    assert torch.equal(first.grad, expected.grad)
    assert torch.equal(again.grad, expected.grad)
    assert not model.front.embeddings.table.weight.requires_grad


@pytest.mark.slow
def test_an_arm_is_freed_before_the_next_is_built(losses, monkeypatch):
    """Compiled parts are reference cycles (the eager backend makes the same ones): weights of the last
    arm must be gone all the same, also of one that failed. Python's own collector is off meanwhile.
    """
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    batch = next(iter(SyntheticClicks(rows=64, seed=0).batches(8)))
    weights = []
    alive = []

    def make():
        alive.append([weight() is not None for weight in weights])
        model = nn.ModuleDict({"block": nn.Sequential(nn.Sequential(nn.Linear(13, 1), nn.Flatten(0)))})
        model.forward = lambda dense, sparse: model["block"](dense)  # a cycle of its own
        weights.append(weakref.ref(model["block"][0][0].weight))
        return model

    def fails():
        model = make()
        raise RuntimeError(f"{type(model).__name__} was built and then refused")

    arms = {name: Arm(name=name, build=fails if name == "b" else make) for name in "abcd"}
    gc.disable()
    try:
        found = time_steps(Arm(name="bf16", build=make), arms, batch, device=CPU)
    finally:
        gc.enable()
    assert [result.name for result in found.values() if result.failure] == ["b"]
    assert alive == [[], [True], [True, False], [True, False, False], [True, False, False, False]]


def test_the_race_is_asked_for_pairs_and_its_failures_are_kept(monkeypatch):
    batch = next(iter(SyntheticClicks(rows=64, seed=0).batches(8)))
    asked = []
    times = {"bf16": 10.0, "again": 11.0, "fast": 5.0}

    def race(functions, **options):
        asked.append((list(functions), options))
        timings = {
            name: Timing(
                microseconds=Estimate(times[name], 0.0, 99.0), speedup=Estimate(10.0 / times[name], 0.0, 9.0), rounds=9
            )
            for name in functions
            if name in times
        }
        failures = {"unfit": "RuntimeError: cannot be captured"} if "unfit" in functions else {}
        done = Race(timings=timings, samples={}, winner="", rounds=9, ended="rounds")
        return dataclasses.replace(done, failures=failures)

    monkeypatch.setattr(step_time, "time_interleaved", race)
    monkeypatch.setattr(step_time, "has_graphs", lambda device: True)
    arms = {name: Arm(name=name, build=wukong, count=lambda model: 3) for name in ("unfit", "fast")}
    base = Arm(name="bf16", build=wukong)
    found = time_steps(base, arms, batch, device=CPU, compile_blocks=False, rounds=13)
    assert [names for names, _ in asked] == [["bf16", "again"], ["bf16", "unfit"], ["bf16", "fast"]]
    for names, options in asked:
        assert options == {"baseline": "bf16", "device": CPU, "keep": names, "max_rounds": 13}
    assert found["bf16"].microseconds.value == 11.0, "the baseline against itself"
    assert found["bf16"].low_precision == 0
    assert found["unfit"] == StepTime(name="unfit", failure="RuntimeError: cannot be captured")
    assert (found["fast"].microseconds.value, found["fast"].speedup.value) == (5.0, 2.0)
    assert found["fast"].low_precision == 3


def test_an_unusable_gpu_ends_it(losses):
    batch = next(iter(SyntheticClicks(rows=64, seed=0).batches(8)))

    def poisoned():
        raise torch.AcceleratorError("an illegal memory access was encountered")

    told = []
    arms = {name: Arm(name=name, build=poisoned) for name in "ab"}
    base = Arm(name="bf16", build=wukong)
    with pytest.raises(torch.AcceleratorError, match="illegal memory"):
        time_steps(base, arms, batch, device=CPU, compile_blocks=False, on_result=told.append)
    assert [result.name for result in told] == ["bf16"], "what was found before is told"


def test_off_a_gpu_it_says_so():
    batch = next(iter(SyntheticClicks(rows=8, seed=0).batches(8)))
    with pytest.raises(ValueError, match="CUDA graphs"):
        time_steps(Arm(name="bf16", build=wukong), {}, batch, device=CPU)


def asked(model):
    return {id(module) for module in model.modules() if module._compiled_call_impl is not None}


def test_blocks_are_compiled_and_tables_are_not():
    model = compiled(wukong())
    assert asked(model) == {id(m) for m in (*model.layers, model.top)}
    layer = nn.TransformerEncoderLayer(16, 2, 32)
    encoder = compiled(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))
    assert asked(encoder) == {id(module) for module in encoder.layers}
    deep = nn.Sequential(nn.Embedding(8, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 1))
    parts = nn.ModuleDict({"tables": nn.Sequential(nn.Sequential(nn.Embedding(8, 4))), "deep": deep})
    assert asked(compiled(parts)) == {id(deep[1])}, "of a container with tables, the rest"
    assert not asked(uncompiled(parts))


def test_all_but_torchrecs_tables_is_compiled_as_one(monkeypatch):
    pytest.importorskip("fbgemm_gpu")
    pytest.importorskip("torchrec")
    from loka.distributed.tables.embedding_bags import with_embedding_bags

    seen, real = [], torch.compile

    def backend(graph, inputs):
        seen.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    batch = next(iter(SyntheticClicks(rows=8, seed=0).batches(8)))
    model = with_embedding_bags(build("dcnv2", dense_features=13, vocab_sizes=[1000] * 26))
    expected = model(batch.dense, batch.sparse % 1000)
    layers = sum(isinstance(module, nn.Linear) for module in model.modules())
    monkeypatch.setattr(torch, "compile", lambda function, **options: real(function, backend=backend))
    assert asked(compiled(model)) == {id(model)}
    torch.testing.assert_close(model(batch.dense, batch.sparse % 1000), expected)
    of_layers = [sum(target is nn.functional.linear for target in graph) for graph in seen]
    assert sum(of_layers) == layers, "the bottom and the logit, which are no blocks, among them"
    assert len(of_layers) == 2, "the dense token beside the tables, and what is behind it"
    assert not asked(uncompiled(model))
    assert not any("forward" in vars(module) for module in model.modules())


def test_containers_of_torch_are_compiled_too(monkeypatch):
    """Dynamo skips frames of torch.nn, so that nn.Sequential.compile() alone compiles nothing."""
    graphs, real = [], torch.compile

    def backend(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    monkeypatch.setattr(torch, "compile", lambda function, **options: real(function, backend=backend))
    model = nn.ModuleDict({"top": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))})
    x = torch.randn(3, 4)
    expected = model["top"](x)
    torch.testing.assert_close(compiled(model)["top"](x), expected)
    (graph,) = graphs
    assert len(graph) == 3, "one graph of all its layers"


@pytest.mark.slow
def test_bench_step_from_the_command_line(losses, tmp_path, monkeypatch):
    monkeypatch.setattr(step, "measure", measure_coarsely)
    monkeypatch.setattr(step, "has_graphs", lambda device: True)
    command = ["bench", "step", "--model", "dlrm", "--batch-size", "32", "--device", "cpu", "--eager"]
    command += ["--candidate", "emulated:rowwise_e4m3", "--candidate", "torch:tensorwise_e4m3"]
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0
    path = tmp_path / "step.json"
    arms = read_record(path, kind="loka-bench-step", version=1, way_out="", parse=lambda c: c["arms"])
    assert next(iter(arms)) == "bf16"
    assert arms["dispatch (plan)"]["low_precision"] > 0
    assert arms["dispatch (plan)"]["failure"] is None
    assert "MissingLibrary" in arms["torchao rowwise"]["failure"]
    assert "torchao rowwise, its filter" in (tmp_path / "step.txt").read_text()
    assert (tmp_path / "plan.json").exists()


@pytest.mark.slow
def test_a_model_of_single_layers_is_timed_compiled(losses, without_inductor):
    """Tables in it begin no graph anew, and have no gradient."""

    class Flat(nn.Module):
        def __init__(self, dense):
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(50, 4, sparse=True) for _ in range(2))
            self.first, self.logit = nn.Linear(dense + 8, 32), nn.Linear(32, 1)

        def forward(self, dense, sparse):
            rows = [table(ids % 50) for table, ids in zip(self.tables, sparse.unbind(1)[:2], strict=True)]
            return self.logit(torch.relu(self.first(torch.cat([dense, *rows], dim=1)))).squeeze(1)

    source, built = SyntheticClicks(rows=64, seed=0), []

    def make():
        torch.manual_seed(0)
        built.append(Flat(source.dense_features))
        return built[-1]

    batch = next(iter(source.batches(32)))
    for compile_blocks in (False, True):
        torch._dynamo.reset(), torch._dynamo.utils.counters.clear()
        time_steps(Arm(name="bf16", build=make), {}, batch, device=CPU, compile_blocks=compile_blocks)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    written, model = built
    # Sums of bf16 products in another order.
    torch.testing.assert_close(model.first.weight.grad, written.first.weight.grad, rtol=0.05, atol=1e-4)
    assert all(table.weight.grad is None for table in model.tables)
    rows = model.tables[0].get_parameter("rows_32_4")
    assert rows.grad.any()
