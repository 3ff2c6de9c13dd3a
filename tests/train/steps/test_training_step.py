import copy
import importlib
from dataclasses import replace

import pytest
import torch
from small_run import RandomRows, small_model, stop_at
from torch import nn

from loka.data import SyntheticClicks
from loka.train import TrainConfig, train
from loka.train.steps.agreement import disagreement
from loka.train.steps.forward import matrix_precision
from loka.zoo import HistoryTable, build

module = importlib.import_module("loka.train.steps.step")

CONFIG = TrainConfig(batch_size=64, precision="fp32")
ROWS = RandomRows(64 * 6 + 10)  # the last batch is short


def of_zoo(device="cpu"):
    torch.manual_seed(0)
    return build("dlrm", dense_features=4, vocab_sizes=ROWS.vocab_sizes).to(device)


def weights_after(config, model=None, *, rows=ROWS, **others):
    model = of_zoo(config.device) if model is None else model
    result = train(model, rows, config=config, **others)
    return torch.cat([weight.detach().flatten().cpu() for weight in model.parameters()]), result


def close(found, exact):
    """Adam moves a weight by the rate whatever the size of its gradient, so rounding decides where a
    gradient is nearly zero; all others agree."""
    assert ((found - exact).abs() < 1e-5).double().mean() > 0.99


def test_parts_of_a_batch_add_up():
    exact, _ = weights_after(CONFIG)
    found, result = weights_after(replace(CONFIG, accumulate=3))
    assert result.rows == ROWS.rows
    close(found, exact)
    assert not torch.equal(found, exact)  # it did go in parts


def test_parts_are_one_update_on_their_rows():
    sizes, steps = [], []
    model = small_model()
    model.mlp.register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    train(model, ROWS, config=replace(CONFIG, accumulate=4), on_step=steps.append)
    assert sizes == [16] * 24 + [3, 3, 3, 1]
    assert steps[-1] == 7


@pytest.mark.parametrize("accumulate", [1, 3])
def test_each_row_counts_alike_in_a_short_batch(accumulate):
    """Gradients are the rows' sum over the 64 of a whole batch, for dense weights and for tables."""
    model, before = of_zoo(), {}

    def keep(step):
        if step == 6:
            before.update({name: value.clone() for name, value in model.state_dict().items()})

    train(model, ROWS, config=replace(CONFIG, accumulate=accumulate), on_step=keep)
    *_, last = ROWS.batches(64)
    assert len(last) == 10
    twin = of_zoo()
    twin.load_state_dict(before)
    losses = nn.functional.binary_cross_entropy_with_logits(twin(last.dense, last.sparse), last.label, reduction="none")
    (losses.sum() / 64).backward()
    for (name, weight), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        found, exact = weight.grad.to_dense(), expected.grad.to_dense()
        # float32, whose sums over 10 rows are taken in another order.
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-7, msg=name)
        assert exact.abs().max() > 1e-4, name  # far above that tolerance


@pytest.fixture
def quick_compiler(monkeypatch):
    """Without code of its own: that takes a minute on a CPU."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: real(function, backend="aot_eager"))


@pytest.mark.usefixtures("quick_compiler")
def test_a_compiled_step_trains_alike():
    exact, _ = weights_after(CONFIG)
    model = of_zoo()
    found, result = weights_after(replace(CONFIG, step="compile"), model)
    assert result.step_reason is None
    close(found, exact)
    assert all(part._compiled_call_impl is None for part in model.modules()), "it is left as it was found"


def compile_one(name, backend, monkeypatch):
    def compiled(model, replayed):
        member = getattr(model, name)
        member._compiled_call_impl = torch.compile(lambda x: member._call_impl(x), backend=backend)
        return model

    def uncompiled(model):
        getattr(model, name)._compiled_call_impl = None
        return model

    monkeypatch.setattr(module, "compiled", compiled)
    monkeypatch.setattr(module, "uncompiled", uncompiled)


def test_what_cannot_be_compiled_runs_eagerly_to_the_same_bits(monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError("no compiler here")

    exact, _ = weights_after(CONFIG, small_model())
    compile_one("mlp", broken, monkeypatch)
    found, result = weights_after(replace(CONFIG, step="compile"), small_model())
    assert "no compiler here" in result.step_reason
    assert torch.equal(found, exact)  # dropout's random state and the buffer were put back


@pytest.mark.parametrize(("wrong", "told"), [(3.0, True), (float("nan"), True), (1.01, False)])
def test_what_a_compiler_gets_wrong_runs_eagerly_to_the_same_bits(wrong, told, monkeypatch):
    def scaled(graph, inputs):
        return lambda *args: [wrong * output for output in graph(*args)]

    exact, _ = weights_after(CONFIG)
    compile_one("top", scaled, monkeypatch)
    found, result = weights_after(replace(CONFIG, step="compile"))
    assert torch.equal(found, exact) == told
    assert ("away from those of its code as written" in (result.step_reason or "")) == told


class Counting(nn.Module):
    """Its logits are of the number of forwards, and it writes to its input."""

    def __init__(self):
        super().__init__()
        self.top = nn.Linear(4, 1)
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, dense, sparse):
        self.forwards += 1
        return self.top(dense.mul_(0.5))[:, 0] * self.forwards


def test_the_first_batch_is_compared_from_the_same_state(monkeypatch):
    for name in ("compiled", "uncompiled"):
        monkeypatch.setattr(module, name, lambda model, **_: model)
    rows = SyntheticClicks(rows=64, seed=0, dense_features=4)
    torch.manual_seed(0)
    model = Counting()
    exact, _ = weights_after(CONFIG, copy.deepcopy(model), rows=rows)
    found, result = weights_after(replace(CONFIG, step="compile"), model, rows=rows)
    assert result.step_reason is None
    assert torch.equal(found, exact)


@pytest.mark.parametrize(
    ("wrong", "told"), [((1, -1), "200%"), ((0, 1), "100%"), ((1, float("nan")), "nan%"), ((1, 1), "")]
)
def test_no_task_hides_what_is_wrong_in_another(wrong, told):
    written, times = torch.randn(64, 2) * torch.tensor([10, 0.1]), iter([torch.ones(2), torch.tensor(wrong)])
    found = disagreement(nn.Identity(), lambda: written * next(times))
    assert found is None if not told else f"are {told} away" in found


@pytest.mark.parametrize(("wrong", "told"), [(-1.0, True), (1.05, False)])
def test_a_level_far_from_zero_hides_no_wrong_rows(wrong, told):
    """As of rare positives: of the norm a flipped sign is 10 %."""
    rows, times = 0.3 * torch.randn(64), iter([1.0, wrong])
    found = disagreement(nn.Identity(), lambda: rows * next(times) - 6)
    assert (found is not None) == told


def test_random_numbers_are_those_of_the_model_s_gpu(monkeypatch):
    generators = torch.Generator(), torch.Generator()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(torch.cuda.random, "_lazy_call", lambda call, **_: call())
    for name, answer in {"device_count": 2, "current_device": 0, "_lazy_init": None}.items():
        monkeypatch.setattr(torch.cuda.random, name, lambda answer=answer: answer)
    assert disagreement(nn.Identity(), lambda: torch.rand(64, generator=generators[1])) is None
    monkeypatch.setattr(module, "device_of", lambda model: torch.device("cuda", 1))
    before = module._Before(nn.Identity())
    expected = torch.rand(8, generator=generators[1])
    before.put_back()
    assert torch.equal(torch.rand(8, generator=generators[1]), expected)


@pytest.mark.usefixtures("quick_compiler")
def test_a_graph_needs_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("here is one")
    exact, _ = weights_after(replace(CONFIG, step="compile"))
    found, result = weights_after(replace(CONFIG, step="graph"))
    assert result.step_reason == "CUDA graphs need a CUDA device; the model is on cpu"
    assert torch.equal(found, exact)


@pytest.fixture
def tables_beside(monkeypatch):
    """All of step="graph" but the compiler and the capture: lookups outside, their gradients handed back."""
    monkeypatch.setattr("loka.train.steps.extent.has_graphs", lambda device: True)
    monkeypatch.setattr(module, "compiled", lambda model, replayed: model)


@pytest.mark.usefixtures("tables_beside")
def test_tables_beside_the_graph_learn_as_inside_of_the_model():
    found, exact = (weights_after(replace(CONFIG, step=step))[0] for step in ("graph", "eager"))
    assert torch.equal(found, exact)
    parts = replace(CONFIG, accumulate=2)  # a table's rows are then added up in another order
    found, exact = (weights_after(replace(parts, step=step))[0] for step in ("graph", "eager"))
    close(found, exact)


HISTORIES = SyntheticClicks(rows=64 * 4 + 10, seed=0, vocab_sizes=(30, 8), dense_features=4, history=5)
ITEM, OWN = HistoryTable(column=0), HistoryTable(vocab_size=30)


def reading_history(name, history, seed=0):
    torch.manual_seed(seed)
    sizes = {"dense_features": 4, "vocab_sizes": HISTORIES.vocab_sizes}
    return build(name, **sizes, history=history) if history else build(name, **sizes)


@pytest.mark.usefixtures("tables_beside")
@pytest.mark.parametrize(
    ("name", "history"), [("hstu", ITEM), ("hstu", OWN), ("interformer", ITEM), ("dhen", OWN), ("dlrm", None)]
)
def test_histories_are_looked_up_beside_the_graph_too(name, history):
    """To the bits, the table of both included; a model that does not read them gets them as they are."""
    found, exact = (
        weights_after(replace(CONFIG, step=step), reading_history(name, history), rows=HISTORIES)[0]
        for step in ("graph", "eager")
    )
    assert torch.equal(found, exact)


@pytest.mark.usefixtures("tables_beside")
def test_histories_go_in_parts_and_resume_exactly(tmp_path):
    def trained(step, seed=0, **others):
        config = replace(CONFIG, step=step, accumulate=2)
        return weights_after(config, reading_history("dhen", ITEM, seed), rows=HISTORIES, **others)[0]

    found = trained("graph")
    close(found, trained("eager"))
    with pytest.raises(KeyboardInterrupt):
        trained("graph", checkpoints=tmp_path, on_step=stop_at(3))
    assert torch.equal(trained("graph", seed=1, checkpoints=tmp_path), found)


@pytest.mark.usefixtures("tables_beside")
def test_tables_of_an_unknown_model_are_a_reason():
    _, result = weights_after(replace(CONFIG, step="graph"), small_model())
    assert "sparse gradients" in result.step_reason
    assert "SmallModel has no `front`" in result.step_reason


@pytest.mark.parametrize("precision", ["bf16", "tf32", "fp32"])
def test_the_precision_of_matrices_is_put_back(precision):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with matrix_precision(precision, torch.device("cuda")):
            inside = torch.get_float32_matmul_precision()
        assert inside == {"bf16": "medium", "tf32": "high", "fp32": "highest"}[precision]
        with matrix_precision(precision, torch.device("cpu")):
            assert torch.get_float32_matmul_precision() == "medium"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_tf32_is_fp32_on_a_cpu():
    if torch.cuda.is_available():
        pytest.skip("here is a GPU")
    assert torch.equal(weights_after(CONFIG)[0], weights_after(replace(CONFIG, precision="tf32"))[0])


def test_deterministic_is_for_the_training_alone():
    found = []

    def note(step):
        found.append((torch.are_deterministic_algorithms_enabled(), fills.fill_uninitialized_memory))

    fills = torch.utils.deterministic
    for asked in (True, False):
        weights_after(replace(CONFIG, deterministic=asked, max_rows=64), on_step=note)
        assert not torch.are_deterministic_algorithms_enabled()
        assert fills.fill_uninitialized_memory
    assert found == [(True, False), (False, True)]


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_graph_trains_alike_and_resumes_exactly(tmp_path, accumulate):
    """Beside other work, too: the other processes of these tests write to the same caches of Inductor."""
    told = {"device": "cuda", "step": "graph", "deterministic": True}
    config = replace(CONFIG, **told, accumulate=accumulate, checkpoint_every=4)
    exact, _ = weights_after(replace(config, step="eager"))
    found, result = weights_after(config)
    assert result.step_reason is None
    close(found, exact)

    with pytest.raises(KeyboardInterrupt):
        weights_after(config, checkpoints=tmp_path, on_step=stop_at(5))
    resumed, _ = weights_after(config, checkpoints=tmp_path)
    assert torch.equal(resumed, found)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["dhen", "interformer", "hstu"])
def test_a_graph_with_a_history_trains_alike(name):
    config = replace(CONFIG, device="cuda", step="graph")
    rows = SyntheticClicks(rows=64 * 8, seed=0, vocab_sizes=(30, 8), dense_features=4, history=5)
    found, result = weights_after(config, reading_history(name, ITEM).cuda(), rows=rows)
    assert result.step_reason is None
    exact, _ = weights_after(replace(config, step="eager"), reading_history(name, ITEM).cuda(), rows=rows)
    close(found, exact)


@pytest.mark.gpu
def test_tf32_differs_from_fp32_on_a_gpu():
    config = replace(CONFIG, device="cuda")
    assert not torch.equal(weights_after(config)[0], weights_after(replace(config, precision="tf32"))[0])
