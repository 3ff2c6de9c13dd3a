"""What forward derived of weights before a model was frozen."""

import pytest
import torch
from served import ROW, converted, plan_for
from torch import nn

from loka.core.exceptions import ServeRefused
from loka.serve import freeze


class Turned(nn.Module):
    """Keeps its second weight as forward wants it, in one of three ways, and constants besides."""

    def __init__(self, kept="none"):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 8, bias=False)
        self.kept, self.scale, self.steps = kept, torch.linspace(1, 2, 32), [torch.arange(8.0)]
        self.noise = torch.randn(8)
        if kept == "none":
            self.turned = None
        elif kept == "dict":
            self.turned = {}

    def forward(self, x):
        x = torch.relu(self.first(x)) * self.scale
        if self.kept == "gone":
            if not hasattr(self, "turned"):
                self.turned = self.second.weight.t().contiguous()
            turned = self.turned
        elif self.kept == "dict":
            turned = self.turned.setdefault("turned", self.second.weight.t().contiguous())
        else:
            if self.turned is None:
                self.turned = self.second.weight.t().contiguous()
            turned = self.turned
        return x @ turned + self.steps[0] + self.noise


class Emptied(Turned):
    def _load_from_state_dict(self, *args):
        self.turned = None
        super()._load_from_state_dict(*args)


def frozen(model):
    return freeze(model.eval(), plan_for(model, {"first": ROW}), calibration=[torch.randn(64, 16)])


@pytest.mark.parametrize("kept", ["none", "gone", "dict"])
def test_it_is_refused_by_name(kept):
    model = Turned(kept)
    frozen(model)  # its copies derive their own
    with torch.no_grad():
        model(torch.randn(4, 16))
    with pytest.raises(ServeRefused, match=r"(?s)derived of weights.*\n  turned\n.*before the first call"):
        frozen(model)


def test_what_is_empty_or_emptied_by_loading_is_right_after_a_refresh():
    x = torch.randn(5, 16)
    for made in (Turned, Emptied):
        model, other = made(), made()
        other.noise = model.noise
        if made is Emptied:
            model(x)
        server = frozen(model)
        server.refresh(other.state_dict())
        with torch.no_grad():
            expected = converted(other, plan_for(other, {"first": ROW}))(x)
        assert torch.equal(server(x).output, expected)


class OwnState(Turned):
    """Takes state dicts of its second version alone."""

    _version = 2

    def _load_from_state_dict(self, state, prefix, metadata, *args):
        if metadata["version"] < 2:
            raise TypeError("an old form")
        super()._load_from_state_dict(state, prefix, metadata, *args)


def test_it_is_found_in_models_that_ask_for_a_version():
    model = OwnState()
    frozen(model)
    with torch.no_grad():
        model(torch.randn(4, 16))
    with pytest.raises(ServeRefused, match="derived of weights"):
        frozen(model)
