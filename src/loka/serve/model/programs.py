"""The compiled calls of a frozen model, by what they are called with; versions of the weights share them."""

import copy
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from loka.core.compiling import compiled_call
from loka.core.exceptions import LokaError, first_line
from loka.nn.site import install, site_forwards
from loka.nn.site_ops import site_forward
from loka.nn.unwrap import named_modules
from loka.serve.model.code import data_of
from loka.serve.model.traced import Traced, likeness, recalled, traced
from loka.serve.model.written import WrittenGraph
from loka.serve.rows import leaves
from loka.serve.run import Runner
from loka.serve.sites import answering, frozen_sites, tracing
from loka.serve.watch.agreement import same_bits

_LOG = logging.getLogger("loka.serve")
_APART = ("_parameters", "_buffers", "_modules")


class Programs:
    """Of one tree, whose tensors are read anew at each call. Its sites stay as they are planned for so many rows.

    `graphs`: of calls with so many rows, which were written when the model was frozen."""

    def __init__(self, tree: nn.Module, run: Runner, graphs: Mapping[int, WrittenGraph]) -> None:
        self._tree, self._run, self._graphs = tree, run, graphs
        self._traced: dict[int, Traced] = {}
        self._by_dynamo: Callable[..., Any] | None = None

    def call(self, inputs: Sequence[torch.Tensor]) -> Callable[[], Any]:
        """The tree's call with these inputs, compiled unless a call with as many rows and like tensors was.

        Where the model's code needs tensors with values, Dynamo compiles what lies between.
        """
        held, rows = held_by(self._tree), inputs[0].shape[0]
        program = self._traced.get(rows)
        if self._by_dynamo is None and (program is None or program.likeness != likeness(held)):
            try:
                program = self._trace(inputs, held)
            except LokaError:
                raise
            except Exception as error:  # of any kind: it is the model's code that runs
                _LOG.info("Dynamo compiles the model, which was not traced without it: %s", first_line(error))
                self._by_dynamo = compiled_call(self._tree)
            else:
                self._traced[rows] = program
        if self._by_dynamo is not None:
            return functools.partial(self._run, self._by_dynamo, inputs)  # type: ignore[arg-type]  # a module's call
        assert program is not None
        return functools.partial(program, inputs, held)

    def written(self) -> dict[int, WrittenGraph]:
        """The graphs of the calls so far that have a text, by the number of rows."""
        return {rows: each.written for rows, each in self._traced.items() if each.written is not None}

    def _trace(self, inputs: Sequence[torch.Tensor], held: Mapping[str, torch.Tensor]) -> Traced:
        """Of a tree of its own, which keeps what its modules note. It answers first with values, so that what functions
        and modules make once for all calls is made of these."""
        with _Sharing():
            tree = like(self._tree)
        rows = inputs[0].shape[0]
        with answering(rows):
            answer = self._run(tree, [each.clone() for each in inputs])
        sites = frozen_sites(self._tree)

        def call(columns: Sequence[torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> Any:
            put(tree, tensors)
            return self._run(tree, columns)

        def multiplied(x: torch.Tensor, weight: object, health: object, name: str, *_: object) -> Any:
            return (sites[name].multiply(x), *[None] * (len(site_forward._schema.returns) - 1))

        ops = {site_forward: multiplied}
        if rows in self._graphs:
            try:
                return recalled(self._graphs[rows], inputs, held, answer=answer, ops=ops)
            except Exception as error:  # of any kind: its ops need not fit this model
                _LOG.info("the model is traced for %d rows, as its graph does not fit: %s", rows, first_line(error))
        return traced(call, inputs, held, answer=answer, ops=ops, tracing=tracing())


class _Sharing(TorchFunctionMode):
    """A copy has the same tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.__deepcopy__ else func(*args, **(kwargs or {}))


def like(tree: nn.Module) -> nn.Module:
    """Another tree of modules and sites with the same tensors."""
    sites = [site for forward in site_forwards(tree).values() for site in forward.sites]
    shared: list[Any] = [*tree.parameters(), *tree.buffers()]
    for site in sites:
        shared += [value for value in vars(site).values() if not isinstance(value, str)]
    return copy.deepcopy(tree, {id(value): value for value in shared})


def fits(template: nn.Module, tree: nn.Module, run: Runner, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether the template with the tensors of `tree` computes what `tree` does, to the bit, for `inputs`. It may not,
    because modules may keep other things too, which hooks of a state dict set or forward derives from weights. These
    have to be equal besides, as a check need not reach them."""
    if held_by(template).keys() != held_by(tree).keys():
        return False
    bind(template, tree)
    for forward in site_forwards(template).values():
        install(forward)  # as in `tree`
    try:
        ours, theirs = like(template), like(tree)
        with answering(inputs[0].shape[0]):
            answers = [leaves(run(each, [x.clone() for x in inputs])) for each in (ours, theirs)]
        if data_of(ours) != data_of(theirs):  # with what forward makes once
            return False
    except LokaError:
        raise
    except Exception:  # whatever code raises that finds other things in its modules than it kept there
        return False
    return all(same_bits(one, other) for one, other in zip(*answers, strict=True))


def bind(template: nn.Module, tree: nn.Module) -> None:
    """Gives the template the tensors of `tree`; what its sites note in stays its own."""
    put(template, {name: tensor for name, tensor in held_by(tree).items() if not name.startswith("health")})


def put(tree: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """In the places of those that `held_by` names, and in lists of them, as recurrent layers keep; notes of sites stay
    where `tensors` has none."""
    held = held_by(tree)
    moved = {id(tensor): tensors[name] for name, tensor in held.items() if not name.startswith("health")}
    for path, module in named_modules(tree):
        kinds: list[tuple[str, Any]] = [("parameter", module._parameters), ("buffer", module._buffers)]
        for kind, own in kinds:
            places = {name: f"{kind} {path}.{name}" for name in own}
            own.update({name: tensors[place] for name, place in places.items() if place in held})
        for name, value in vars(module).items():
            kept = name not in _APART and isinstance(value, (list, tuple, dict))
            if kept and any(id(leaf) in moved for leaf in tree_leaves(value)):
                vars(module)[name] = tree_map(lambda leaf: moved.get(id(leaf), leaf), value)
    for name, site in frozen_sites(tree).items():
        weight, parts = site.weight, {part: tensors[f"{part} of {name}"] for part in site.weight.tensors()}
        low = replace(weight.low, data=parts["data"], scale=parts["scale"])
        site.weight = replace(weight, low=low, even=parts.get("even"))
        site.health = tensors.get(f"health of {name}", site.health)
        site.input_scale = tensors.get(f"input scale of {name}")


def held_by(tree: nn.Module) -> dict[str, torch.Tensor]:
    """By name, the tensors that versions differ in, and those that sites note in; without those that are nowhere."""
    held = {
        f"{kind} {path}.{name}": tensor
        for path, module in named_modules(tree)
        for kind, own in (("parameter", module._parameters), ("buffer", module._buffers))
        for name, tensor in own.items()
        if tensor is not None and not tensor.is_meta
    }
    for name, site in frozen_sites(tree).items():
        held |= {f"{part} of {name}": tensor for part, tensor in site.weight.tensors().items()}
        held[f"health of {name}"] = site.health
        if site.input_scale is not None:
            held[f"input scale of {name}"] = site.input_scale
    return held
