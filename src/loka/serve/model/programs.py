"""The compiled calls of a frozen model, by what they are called with; versions of the weights share them."""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from loka.core.compiling import compiled_call
from loka.core.exceptions import LokaError
from loka.core.timing import first_line
from loka.nn.unwrap import named_modules
from loka.serve.model.traced import Traced, likeness, traced
from loka.serve.run import Runner
from loka.serve.sites import frozen_sites, tracing

_LOG = logging.getLogger("loka.serve")


class Programs:
    """Of one tree, whose tensors are read anew at each call. Its sites stay as they are planned for so many rows."""

    def __init__(self, tree: nn.Module, run: Runner) -> None:
        self._tree, self._run = tree, run
        self._traced: dict[int, Traced] = {}
        self._by_dynamo: Callable[..., Any] | None = None

    def call(self, inputs: Sequence[torch.Tensor]) -> Callable[[], Any]:
        """The tree's call with these inputs, compiled unless a call with as many rows and like tensors was.

        Where the model's code needs tensors with values, Dynamo compiles what lies between.
        """
        held, rows = _held(self._tree), inputs[0].shape[0]
        program = self._traced.get(rows)
        if self._by_dynamo is None and (program is None or program.likeness != likeness(held)):
            try:
                program = traced(functools.partial(self._run, self._tree), inputs, held, tracing())
            except LokaError:
                raise
            except Exception as error:  # of any kind: it is the model's code that runs
                _LOG.info("Dynamo compiles the model, whose code needs tensors with values: %s", first_line(error))
                self._by_dynamo = compiled_call(self._tree)
            else:
                self._traced[rows] = program
        if self._by_dynamo is not None:
            return functools.partial(self._run, self._by_dynamo, inputs)  # type: ignore[arg-type]  # a module's call
        assert program is not None
        return functools.partial(program, inputs, held)


def _held(tree: nn.Module) -> dict[str, torch.Tensor]:
    """By name, the tensors that versions differ in, and those that sites note in."""
    held = {
        f"{kind} {path}.{name}": tensor
        for path, module in named_modules(tree)
        for kind, own in (("parameter", module._parameters), ("buffer", module._buffers))
        for name, tensor in own.items()
        if tensor is not None
    }
    for name, site in frozen_sites(tree).items():
        held |= {f"{part} of {name}": tensor for part, tensor in site.weight.tensors().items()}
        held[f"health of {name}"] = site.health
        if site.input_scale is not None:
            held[f"input scale of {name}"] = site.input_scale
    return held
