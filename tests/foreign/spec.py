"""What a foreign model is: how it is built, fed and trained, and what PyTorch can do with it as it is."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

Inputs = tuple[Any, ...] | dict[str, Any]
Loss = Callable[[Any], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """One model. The flags say what torch 2.13 does with the unmodified model on a CPU, in training mode."""

    name: str
    build: Callable[[], nn.Module]  # seeds, and leaves the caller's random state alone
    inputs: Callable[[int], Inputs]  # rows -> positional or keyword arguments
    loss: Loss  # what forward returns -> a scalar
    logits: Callable[[Any], torch.Tensor] | None = None  # None: forward returns no logits
    parameter_gemm_flops: Callable[[int], int] | None = None  # rows -> 2MNK of one forward, derived by hand
    not_sites: tuple[str, ...] = ()  # parameters that are multiplied in a kernel which LoKA only names
    without_gradient: tuple[str, ...] = ()  # parameters that one training step leaves without a gradient
    needs: tuple[str, ...] = ()  # libraries without which a test skips
    notes: str = ""
    fullgraph: bool = True  # torch.compile(fullgraph=True), forward and backward
    export_strict: bool = True
    export_non_strict: bool = True
    deepcopies: bool = True
    pickles: bool = True

    def skip_without_libraries(self):
        for library in self.needs:
            pytest.importorskip(library)


def call(model: Callable[..., Any], inputs: Inputs) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def train_step(foreign: Foreign, model: nn.Module, rows: int = 32) -> torch.Tensor:
    """One forward and one backward. Gradients stay in the parameters; the loss is returned."""
    loss = foreign.loss(call(model, foreign.inputs(rows)))
    loss.backward()
    return loss.detach()


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> Callable[[], nn.Module]:
    @functools.wraps(build)
    def made():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build().train()

    return made


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def floats(*shape: int) -> Callable[[int], Inputs]:
    """Inputs of one tensor, [rows, *shape], normally distributed."""
    return lambda rows: (torch.randn(rows, *shape, generator=generator()),)


def ids(columns: int, vocabulary: int) -> Callable[[int], Inputs]:
    """Inputs of one tensor of ids, [rows, columns]."""
    return lambda rows: (torch.randint(vocabulary, (rows, columns), generator=generator()),)


def labels(like: torch.Tensor) -> torch.Tensor:
    """Zeros and ones in turn, in the shape of `like`."""
    return (torch.arange(like.numel(), device=like.device) % 2).to(like.dtype).reshape(like.shape)


def whole(output: torch.Tensor) -> torch.Tensor:
    return output


def of_logits(logits: Callable[[Any], torch.Tensor] = whole) -> Loss:
    """Binary cross-entropy of what `logits` takes out of the output."""
    return lambda output: F.binary_cross_entropy_with_logits(logits(output), labels(logits(output)))


def of_probabilities(output: Any) -> torch.Tensor:
    """Binary cross-entropy of a model that ends in a sigmoid, as DeepCTR-Torch and FuxiCTR do."""
    probabilities = output["y_pred"] if isinstance(output, dict) else output
    return F.binary_cross_entropy(probabilities, labels(probabilities))


def variant(foreign: Foreign, **changes: Any) -> Foreign:
    return dataclasses.replace(foreign, **changes)
