"""Which modules are cross layers, and which only look like one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loka.nn.cross_match import CrossSpec, match
from loka.zoo.dcn import CrossLayer

N, R = 24, 8


class Cross(nn.Module):
    """Variants override `forward` only."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(N, R, bias=False)
        self.up = nn.Linear(R, N)


LOW = CrossSpec(x0=0, x=1, names=("x0", "x"), u="up", v="down")


class Swapped(Cross):
    def forward(self, x: torch.Tensor, x0: torch.Tensor) -> torch.Tensor:
        return x + self.up(self.down(x)) * x0


class Functions(Cross):
    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.add(torch.mul(self.up(self.down(x)), x0), x)


class Methods(Cross):
    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.down(x)).mul_(x0).add_(x)


class InPlace(Cross):
    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = x0 * self.up(self.down(x))
        y += x
        return y


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Sequential(nn.Linear(N, R, bias=False), nn.Linear(R, N))

    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x0 * self.map(x) + x


def test_layers_of_the_zoo_match() -> None:
    low = CrossSpec(x0=0, x=1, names=("x0", "x"), u="u", v="v")
    assert match(CrossLayer(N, rank=R)) == low
    assert match(CrossLayer(N, rank=None)) == CrossSpec(x0=0, x=1, names=("x0", "x"), u="u", v=None)


@pytest.mark.parametrize("kind", [Functions, Methods, InPlace])
def test_the_same_formula_written_otherwise_matches(kind: type[nn.Module]) -> None:
    assert match(kind()) == LOW


def test_arguments_in_another_order_are_told_apart() -> None:
    assert match(Swapped()) == CrossSpec(x0=1, x=0, names=("x", "x0"), u="up", v="down")


def test_linear_layers_may_lie_deeper() -> None:
    assert match(Nested()) == CrossSpec(x0=0, x=1, names=("x0", "x"), u="map.1", v="map.0")


class NoResidual(Cross):
    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x0 * self.up(self.down(x))


class OtherResidual(Cross):
    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x0 * self.up(self.down(x)) + x0


class OfX0(Cross):
    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x0 * self.up(self.down(x0)) + x


class Square(Cross):
    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x * self.up(self.down(x)) + x


class Activated(Cross):
    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x0 * self.up(torch.relu(self.down(x))) + x


class Weighted(Cross):
    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.add(x0 * self.up(self.down(x)), x, alpha=2)


class Minus(Cross):
    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x0 * self.up(self.down(x)) - x


class WritesItsArgument(Cross):
    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x.add_(x0 * self.up(self.down(x)))


class InTrainingOnly(Cross):
    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x0 * self.up(self.down(x)) + x if self.training else x


class TwoResults(Cross):
    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        v = self.down(x)
        return x0 * self.up(v) + x, v


class Checks(Cross):
    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[0] > 1
        return x0 * self.up(self.down(x)) + x


class Prints(Cross):
    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x.mean()
        return x0 * self.up(self.down(x)) + x


class ThreeArguments(Cross):
    def forward(self, x0: torch.Tensor, x: torch.Tensor, scale: float) -> torch.Tensor:
        return x0 * self.up(self.down(x)) + x


class Default(Cross):
    def forward(self, x0: torch.Tensor, x: torch.Tensor | None = None) -> torch.Tensor:
        return x0 * self.up(self.down(x)) + x


class Branches(Cross):
    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x0 * self.up(self.down(x)) + x if x.sum() > 0 else x


class Gated(Cross):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(N))

    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x0 * self.up(self.down(x)) + x


class Dropped(Cross):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x0 * self.drop(self.up(self.down(x))) + x


class InnerBias(Cross):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(N, R)

    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x0 * self.up(self.down(x)) + x


class Broadcast(Cross):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(R, 1)

    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x0 * self.up(self.down(x)) + x


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(N, N, bias=False)

    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x0 * self.map(self.map(x)) + x


LOOKALIKES = [
    NoResidual, OtherResidual, OfX0, Square, Activated, Weighted, Minus, WritesItsArgument, InTrainingOnly,
    TwoResults, Checks, Prints, ThreeArguments, Default, Branches, Gated, Dropped, InnerBias, Broadcast,
    Twice,
]  # fmt: skip


@pytest.mark.parametrize("kind", LOOKALIKES, ids=lambda kind: kind.__name__)
def test_lookalikes_do_not_match(kind: type[nn.Module]) -> None:
    assert match(kind()) is None


def test_a_hook_or_a_subclass_of_linear_prevents_a_match() -> None:
    hooked = CrossLayer(N, rank=R)
    hooked.u.register_forward_hook(lambda module, arguments, out: out * 2)
    assert match(hooked) is None
    replaced = CrossLayer(N, rank=R)
    replaced.u = nn.utils.parametrizations.spectral_norm(replaced.u)
    assert match(replaced) is None


class Remembers(Cross):
    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        self.last = x
        return x0 * self.up(self.down(x)) + x


class Counts(Cross):
    calls = 0

    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x0 * self.up(self.down(x)) + x


@pytest.mark.parametrize("kind", [Remembers, Counts])
def test_a_module_that_remembers_does_not_match_and_is_left_clean(kind: type[nn.Module]) -> None:
    module = kind()
    assert match(module) is None
    assert not {"last", "calls"} & set(module.__dict__)


def test_plain_modules_do_not_match_and_stay_as_they_are() -> None:
    assert match(nn.Linear(N, N)) is None
    assert match(nn.Sequential(nn.Linear(N, R), nn.Linear(R, N))) is None
    layer = CrossLayer(N, rank=R).eval()
    layer.u.train()
    assert match(layer) is not None
    assert (layer.training, layer.u.training, layer.v.training) == (False, True, False)
