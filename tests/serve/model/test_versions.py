"""What versions and traces of a model share, and what they must not: servers with the stand-in for graphs."""

import enum
import functools
import threading
from unittest.mock import patch

import pytest
import torch
from test_serve_graphs import (
    BUCKETS,
    Wide,
    backend,  # noqa: F401
    compiled_answer,
    frozen,
    inputs,
    wide,
)
from torch import nn

from loka.core.exceptions import ServeRefused
from loka.serve import load
from loka.serve.model.programs import Programs
from loka.serve.rows import form_of
from loka.serve.run import Runner


@functools.lru_cache
def places(rows):
    return torch.ones(rows)


@pytest.mark.slow
def test_what_a_function_keeps_for_later_calls_has_values(backend, tmp_path):  # noqa: F811
    """Tracing runs the model's code over tensors without any, which such a function would give to every other call."""

    class Placing(Wide):
        def forward(self, x):
            return super().forward(x) + places(len(x))

    torch.manual_seed(0)
    model = Placing().eval()
    frozen(model).save(tmp_path)
    places.cache_clear()
    server = load(tmp_path, model)
    assert torch.equal(server(inputs(16)).output, compiled_answer(model, inputs(16)))
    assert all(type(places(rows)) is torch.Tensor for rows in BUCKETS)


def test_a_cache_that_keeps_tensors_of_the_trace_is_said(backend):  # noqa: F811
    """One entry for two keys: with values before the trace, and without behind it."""

    @functools.lru_cache(maxsize=1)
    def one(rows):
        return torch.ones(rows)

    class Placing(Wide):
        def forward(self, x):
            return super().forward(x) + one(16)[0] + one(len(x))[0] + one(16)[1]

    torch.manual_seed(0)
    with pytest.raises(ServeRefused, match=r"(?s)kept a tensor of the trace.*cache"):
        frozen(Placing().eval())


def test_scripted_modules_have_no_graphs(backend):  # noqa: F811
    class Scripted(Wide):
        def __init__(self):
            super().__init__()
            self.slope = torch.jit.script(nn.PReLU())

        def forward(self, x):
            return super().forward(self.slope(x))

    with pytest.raises(ServeRefused, match=r"(?s)scripted.*slope.*graphs=False"):
        frozen(Scripted().eval())


class Scaled(Wide):
    """What its state dict holds besides tensors; `kept` is derived of a weight in the first call."""

    scale, kept = 1.0, None

    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale, self.kept = state["scale"], None

    def forward(self, x):
        if self.kept is None:
            self.kept = self.logit.bias.square()
        return super().forward(x) * self.scale + self.kept


@pytest.mark.slow
def test_a_version_whose_modules_keep_other_numbers_is_compiled_anew(backend):  # noqa: F811
    torch.manual_seed(0)
    model = Scaled().eval()
    server, eager = frozen(model), frozen(model, graphs=False)
    graphs_before = len(backend.graphs)
    torch.manual_seed(1)
    other = Scaled().eval()
    other.scale = 3.0
    for each in (server, eager):
        each.refresh(other.state_dict())
    assert len(backend.graphs) > graphs_before
    torch.testing.assert_close(server(inputs(9)).output, eager(inputs(9)).output, atol=0.02, rtol=0.02)  # bf16 steps
    assert (server(inputs(9)).output - frozen(model)(inputs(9)).output).abs().max() > 0.1


@pytest.mark.slow
def test_versions_are_made_in_inference_mode_too(backend):  # noqa: F811
    server = frozen(wide())
    with torch.inference_mode():
        server.refresh(wide(seed=1).state_dict())
        inside = server(inputs(16)).output
    assert torch.equal(server(inputs(16)).output, inside)
    assert torch.equal(inside, compiled_answer(wide(seed=1), inputs(16)))


class Mode(enum.Enum):
    PLAIN, LOUD = 1, 2


class Odd(Wide):
    """What a state dict brings that is no number; a mask without memory, and layers that keep their weights in a list
    too."""

    def __init__(self):
        super().__init__()
        self.mode, self.shape = Mode.PLAIN, torch.empty(3, device="meta")
        self.before = nn.GRU(16, 16, batch_first=True)

    def get_extra_state(self):
        return self.mode

    def set_extra_state(self, state):
        self.mode = state

    def forward(self, x):
        x = x + self.before(x[:, None])[0][:, 0]
        return super().forward(x) * (1.0 if self.mode is Mode.PLAIN else 1.03)


def test_a_version_is_compiled_anew_where_it_answers_otherwise_and_only_there(backend):  # noqa: F811
    torch.manual_seed(0)
    model = Odd().eval()
    server, eager = frozen(model), frozen(model, graphs=False)
    compiled = len(backend.graphs)
    for mode, added in ((Mode.PLAIN, 0), (Mode.LOUD, len(BUCKETS))):
        torch.manual_seed(1)
        other = Odd().eval()
        other.mode = mode
        for each in (server, eager):
            each.refresh(other.state_dict())
        assert len(backend.graphs) == compiled + added
        found, wanted = server(inputs(16)).output, eager(inputs(16)).output
        assert (found - wanted).norm() < 0.015 * wanted.norm()  # bf16 rounds otherwise, by less than the mode does


@torch.no_grad()
def test_threads_trace_one_after_the_other():
    """Tracers patch nn.Module for the process: one would undo what the other has patched, for good."""
    x, call, failed = torch.randn(6, 8), nn.Module.__call__, []

    def trace():
        with torch.no_grad():
            for _ in range(4):
                model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)]).eval()
                try:
                    Programs(model, Runner(form=form_of(x), autocast=None), {}).call([x])
                except Exception as error:
                    failed.append(error)

    with patch("torch._inductor.compile_fx.compile_fx", lambda graph, inputs: graph):
        threads = [threading.Thread(target=trace) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed
    assert nn.Module.__call__ is call
