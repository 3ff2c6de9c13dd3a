import pytest
import torch
from graphed_cases import assert_same_training, batches, graph_of, module, plain, sgd, small, step_of, twins
from torch import nn

from loka.train import GraphedStep, RowwiseAdagrad, graphed


def test_a_failed_capture_leaves_no_trace(fake):
    """The step asserts that the gradients it finds were computed; those of a capture are not."""
    model, twin, optimizer, other, recorder = twins(fake)
    recorder.error = RuntimeError("operation not permitted when stream is capturing\nand more")
    data = batches(*[8] * 6)
    step = graph_of(model, optimizer, data)
    for batch in data[:2]:
        step(*batch)
    reason = "the step cannot be captured: RuntimeError: operation not permitted when stream is capturing"
    with pytest.warns(RuntimeWarning, match=reason):
        step(*data[2])
    for batch in data[3:]:
        step(*batch)
    plain(twin, other, data)
    assert_same_training(model, twin)
    assert (step.graphed, step.reason, recorder.captures) == (False, reason, 1)
    assert step.eager_steps == {module.WARM_UP: 2, reason: 4}


class Counting(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["steps"] = self.state[weight].get("steps", 0) + 1


class Lazy(torch.optim.SGD):
    """Has no state until its third step, when the capture runs."""

    def __init__(self, parameters, lr, momentum):
        super().__init__(parameters, lr=lr)

    def step(self, closure=None):
        super().step()
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 3:
            self.state[self.param_groups[0]["params"][0]]["late"] = torch.zeros(1)


class Decaying(torch.optim.SGD):
    factor = 1.0

    def step(self, closure=None):
        super().step()
        self.param_groups[0]["lr"] *= self.factor


class Running(nn.Linear):
    def __init__(self):
        super().__init__(6, 1)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x - self.mean)


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x) * float(torch.rand(()))


@pytest.mark.parametrize(
    ("make", "optim", "reason"),
    [
        (small, Counting, "Counting makes 'steps' of its state anew or counts it on the host"),
        (small, Lazy, "Lazy makes 'late' of its state anew"),
        (lambda: Running(), torch.optim.SGD, "replaces the buffer 'mean' of Running"),
        (lambda: Noisy(6, 1), torch.optim.SGD, "draws random numbers on the host"),
    ],
)
def test_work_on_the_host_is_found_and_taken_back(fake, make, optim, reason):
    data = batches(*[8] * 5)
    trained = []
    for is_graphed in (True, False):
        torch.manual_seed(3)
        model = make()
        optimizer = optim(model.parameters(), lr=0.1, momentum=0.9)
        fake(model, optimizer)
        step = step_of(model, optimizer)
        if is_graphed:
            step = graphed(step, *data[0], model=model, optimizers=optimizer, warmup=2)
        torch.manual_seed(4)
        for index, batch in enumerate(data):
            if is_graphed and index == 2:
                with pytest.warns(RuntimeWarning, match=reason):
                    step(*batch)
                assert reason in step.reason
            else:
                step(*batch)
        trained.append((model, optimizer))
    (model, optimizer), (twin, other) = trained
    if optim is not Lazy:  # its count of calls, a plain attribute, is beyond what can be taken back
        assert_same_training(model, twin)
        for weight, expected in zip(optimizer.state.values(), other.state.values(), strict=True):
            assert weight.get("steps") == expected.get("steps")
    else:
        assert all("late" not in state for state in optimizer.state.values()), "the capture's is gone"
    for buffer, expected in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(buffer, expected)


@pytest.mark.parametrize("since", [1, 2])
def test_a_schedule_inside_the_step_is_found(fake, since):
    """By the value that the next step finds, and in the capture if it starts no sooner."""
    model, twin = small(), small()
    optimizer, other = (Decaying(each.parameters(), lr=0.1) for each in (model, twin))
    recorder = fake(model, optimizer)
    data = batches(*[8] * 5)
    step = graph_of(model, optimizer, data)
    reason = ["changed from 0.1 to 0.05", "the step changes 'lr' of group 0 of Decaying"][since - 1]
    with pytest.warns(RuntimeWarning, match=reason):  # noqa: PT031
        for index, batch in enumerate(data):
            optimizer.factor = other.factor = 0.5 if index >= since else 1.0
            step(*batch)
            plain(twin, other, [batch])
            assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"]
    assert_same_training(model, twin)
    assert not step.graphed
    assert recorder.captures == since - 1


def test_what_rules_a_graph_out_is_named(fake):
    def reason(model, *optimizers):
        fake(model, optimizers[0])
        return graphed(lambda x: x, torch.zeros(1), model=model, optimizers=optimizers).reason

    model = small()
    adam = torch.optim.Adam(model.parameters())
    assert "group 0 of Adam has capturable=False" in reason(model, adam)
    assert "build it as Adam(..., capturable=True)" in reason(model, sgd(model), adam)
    adam.param_groups[0]["capturable"] = True
    assert reason(model, adam) == "warm-up: 0 of 3 steps done"
    table = nn.ModuleDict({"front": nn.Sequential(nn.EmbeddingBag(4, 2, sparse=True))})
    assert reason(table, sgd(table)).startswith("front.0 has sparse gradients")
    table.requires_grad_(False)
    assert reason(table, sgd(model)) == "warm-up: 0 of 3 steps done"
    spread = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    assert "several devices: cpu and meta" in reason(spread, sgd(spread))
    lr = torch.tensor(0.1, device="meta")
    assert "'lr' of group 0 of SGD is a tensor on meta" in reason(
        model, torch.optim.SGD(model.parameters(), lr=0.1), _with_lr(sgd(model), lr)
    )


def _with_lr(optimizer, lr):
    optimizer.param_groups[0]["lr"] = lr
    return optimizer


def test_sparse_gradients_of_any_module_are_found_after_a_step(fake):
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = nn.Parameter(torch.ones(4, 2))

        def forward(self, ids):
            return nn.functional.embedding(ids, self.rows, sparse=True)

    model = Table()
    optimizer = RowwiseAdagrad(model.parameters())
    fake(model, optimizer)

    def function(ids):
        optimizer.zero_grad(set_to_none=True)
        loss = model(ids).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    ids = torch.tensor([1, 2])
    step = graphed(function, ids, model=model, optimizers=optimizer)
    with pytest.warns(RuntimeWarning, match=r"the gradient of rows is torch.sparse_coo"):
        step(ids)
    assert "gradient of rows" in step.reason


def test_what_cannot_be_asked_for():
    model = small()
    optimizer, (batch,) = sgd(model), batches(4)
    make = step_of(model, optimizer)
    with pytest.raises(ValueError, match="warmup=0"):
        graphed(make, *batch, model=model, optimizers=optimizer, warmup=0)
    with pytest.raises(ValueError, match="no example"):
        graphed(make, model=model, optimizers=optimizer)
    step = graphed(make, *batch, model=model, optimizers=optimizer)
    assert isinstance(step, GraphedStep)
    with pytest.raises(ValueError, match="takes 2 tensors"):
        step(batch[0])
    with pytest.raises(ValueError, match="requires a gradient"):
        step(batch[0].clone().requires_grad_(), batch[1])
    wrong = graphed(lambda x: 1.0, batch[0], model=model, optimizers=optimizer)
    with pytest.raises(TypeError, match="not float"):
        wrong(batch[0])
