import threading

import pytest
import torch
from torch import nn

from loka.core.exceptions import LokaError
from loka.probe import Probe


class Gate(nn.Module):
    """Waits in the middle of the forward pass until the other thread has gone through the whole of its own."""

    def __init__(self):
        super().__init__()
        self.inside, self.passed = threading.Event(), threading.Event()

    def forward(self, x):
        if threading.current_thread() is threading.main_thread():
            self.inside.set()
            self.passed.wait(10)
        return x


@pytest.mark.parametrize("grad", [False, True])
def test_a_call_in_another_thread_leaves_a_sampled_step_alone(grad):
    """An evaluation in a thread ended the training: its calls were taken for modules of the watched pass."""
    torch.manual_seed(0)
    gate = Gate()
    model = nn.Sequential(nn.Linear(13, 8), gate, nn.Linear(8, 1))
    x, said = torch.randn(4, 13), []

    def call():
        gate.inside.wait(10)
        try:
            with torch.set_grad_enabled(grad):
                said.append(model(x))
        except LokaError as error:
            said.append(error)
        gate.passed.set()

    thread = threading.Thread(target=call)
    with Probe(model, every=1) as probe:
        thread.start()
        out = model(x)
        out.square().mean().backward()
        thread.join()
    stats = probe.stats()
    assert (stats.steps, stats.sampled_steps, list(stats.layers)) == (1, 1, ["0", "2"])
    assert {layer.calls for layer in stats.layers.values()} == {1}
    if grad:
        assert "two threads call the probed model at once" in str(said[0])
    else:
        assert torch.equal(said[0], out)
    assert not torch.overrides._get_current_function_mode_stack()


class WaitInBackward(torch.autograd.Function):
    """The first backward through it, which is the extra one, waits until the other thread has made a whole step."""

    @staticmethod
    def forward(ctx, x, turns):
        ctx.turns = turns
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        inside, passed = ctx.turns
        inside.set()
        passed.wait(10)
        return grad, None


def test_an_extra_backward_in_another_thread_is_told_from_training():
    """The other model's gradients of training went uncounted meanwhile, and after its own extra backward the rest of
    this one counted as training: gradients came out 15 times as large."""
    torch.manual_seed(0)
    model, other, x = *(nn.Sequential(nn.Linear(13, 8), nn.Linear(8, 1)) for _ in range(2)), torch.randn(16, 13)
    turns = threading.Event(), threading.Event()

    model[1].register_forward_pre_hook(lambda module, given: WaitInBackward.apply(*given, turns))

    def learnt(model):
        with Probe(model, every=1) as probe:
            model(x).sigmoid().mean().backward()
        return probe.stats()

    turns[1].set()
    alone, found = [learnt(each).digest() for each in (model, other)], []
    for turn in turns:
        turn.clear()
    thread = threading.Thread(target=lambda: found.append(learnt(model)))
    thread.start()
    assert turns[0].wait(10)
    found.append(learnt(other))
    turns[1].set()
    thread.join()
    assert {stats.digest() for stats in found} == set(alone)
