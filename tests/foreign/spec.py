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


def call(model, inputs):
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def train_step(foreign, model, rows=32):
    """One forward and one backward. Gradients stay in the parameters; the loss is returned."""
    loss = foreign.loss(call(model, foreign.inputs(rows)))
    loss.backward()
    return loss.detach()


def seeded(build, seed=0):
    @functools.wraps(build)
    def made():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build().train()

    return made


def generator(seed=1):
    return torch.Generator().manual_seed(seed)


def floats(*shape):
    """Inputs of one tensor, [rows, *shape], normally distributed."""
    return lambda rows: (torch.randn(rows, *shape, generator=generator()),)


def ids(columns, vocabulary):
    """Inputs of one tensor of ids, [rows, columns]."""
    return lambda rows: (torch.randint(vocabulary, (rows, columns), generator=generator()),)


def labels(like):
    """Zeros and ones in turn, in the shape of `like`."""
    return (torch.arange(like.numel(), device=like.device) % 2).to(like.dtype).reshape(like.shape)


def whole(output):
    return output


def of_logits(logits=whole):
    """Binary cross-entropy of what `logits` takes out of the output."""
    return lambda output: F.binary_cross_entropy_with_logits(logits(output), labels(logits(output)))


def of_probabilities(output):
    """Binary cross-entropy of a model that ends in a sigmoid, as DeepCTR-Torch and FuxiCTR do."""
    probabilities = output["y_pred"] if isinstance(output, dict) else output
    return F.binary_cross_entropy(probabilities, labels(probabilities))


def per_row(name, build, inputs, multiplications, *, loss=None, logits=whole, flops_per_batch=0, **more):
    """A model whose parameters are in `multiplications` of each row; its loss is of its logits, or is given."""
    return Foreign(
        name=name,
        build=seeded(build),
        inputs=inputs,
        loss=loss or of_logits(logits),
        logits=logits,
        parameter_gemm_flops=lambda rows: 2 * rows * multiplications + flops_per_batch,
        **more,
    )


def variant(foreign, **changes):
    return dataclasses.replace(foreign, **changes)
