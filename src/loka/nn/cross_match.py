"""Recognizes a cross layer of DCN-V2 in a user's module, whatever its class is called.

    forward(x0, x) = x0 * u(v(x)) + x      or x0 * u(x) + x, operands and arguments in any order

The module's forward is traced symbolically (torch.fx), in training and in evaluation, and both graphs
must be that formula and nothing else. Only small modules are traced: those whose parameters are the
ones of one or two linear layers. A module that cannot be traced, does more or remembers something is
no cross layer.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import fx, nn

from loka.nn.watched import foreign_hooks

_ADD: set[object] = {operator.add, operator.iadd, torch.add}
_MULTIPLY: set[object] = {operator.mul, operator.imul, torch.mul, torch.multiply}
_ADD_METHODS = {"add", "add_"}
_MULTIPLY_METHODS = {"mul", "mul_", "multiply", "multiply_"}
_MOST_MODULES = 8


@dataclass(frozen=True, kw_only=True)
class CrossSpec:
    """`x0` and `x` are the places of forward's arguments, 0 and 1 or 1 and 0; `names` is what they are
    called, in the order of forward. `u` and `v` are the paths of the linear layers inside of the module;
    `v` is None where the rank is full."""

    x0: int
    x: int
    names: tuple[str, str]
    u: str
    v: str | None


def match(module: nn.Module) -> CrossSpec | None:
    """What makes `module` a cross layer, or None where it is none, or nothing is certain."""
    if not _may_be(module):
        return None
    found = []
    for training in (True, False):
        with _mode(module, training):
            graph = _trace(module)
        found.append(None if graph is None else _read(graph, module))
    return found[0] if found[0] == found[1] else None


def _trace(module: nn.Module) -> fx.Graph | None:
    """The graph of forward; None where it cannot be traced, or leaves something behind in the module."""
    before = {inner: dict(inner.__dict__) for inner in module.modules()}
    graph = None
    try:
        graph = fx.Tracer().trace(module)
    except Exception:  # the forward is a stranger's: anything may go wrong with proxies in it
        return None
    finally:
        for inner, state in before.items():
            if {k: id(v) for k, v in inner.__dict__.items()} != {k: id(v) for k, v in state.items()}:
                graph = None
                inner.__dict__.clear()
                inner.__dict__.update(state)
    return graph


def _may_be(module: nn.Module) -> bool:
    """Cheap: before any of the module's own code runs."""
    modules = list(module.modules())
    linears = [inner for inner in modules if isinstance(inner, nn.Linear)]
    if isinstance(module, nn.Linear | fx.GraphModule | torch.jit.ScriptModule):
        return False
    if len(modules) > _MOST_MODULES or len(linears) not in (1, 2):
        return False
    # A hook, a parametrization or a subclass makes of a linear layer something that its weight does not tell.
    plain = all(type(linear) is nn.Linear for linear in linears)
    if not plain or any(_hooked(inner) for inner in modules):
        return False
    own = {id(tensor) for linear in linears for tensor in linear.parameters()}
    return {id(tensor) for tensor in module.parameters()} == own and not list(module.buffers())


def _hooked(module: nn.Module) -> bool:
    """By others than LoKA, whose hooks only watch."""
    return foreign_hooks(vars(module), "") or "forward" in module.__dict__


@contextmanager
def _mode(module: nn.Module, training: bool) -> Iterator[None]:
    """`training` set as an attribute: a module's own `train` may do more than that."""
    before = [(inner, inner.training) for inner in module.modules()]
    try:
        for inner, _ in before:
            inner.training = training
        yield
    finally:
        for inner, was in before:
            inner.training = was


def _read(graph: fx.Graph, module: nn.Module) -> CrossSpec | None:
    nodes = list(graph.nodes)
    arguments = [node for node in nodes if node.op == "placeholder"]
    result = nodes[-1].args[0]
    if len(arguments) != 2 or not isinstance(result, fx.Node):
        return None
    for x0, x in (arguments, arguments[::-1]):
        product = _other(result, _ADD, _ADD_METHODS, x)
        outer = None if product is None else _other(product, _MULTIPLY, _MULTIPLY_METHODS, x0)
        if outer is None or product is None:
            continue
        u, inner = _linear(outer, module), _argument(outer)
        v = None
        body = {result, product, outer}
        if u is not None and inner is not None and inner is not x:
            v, inner = _linear(inner, module), _argument(inner)
            body.add(outer.args[0])  # type: ignore[arg-type]
            if v is None or v[1].bias is not None or v[1] is u[1]:
                continue
        # Nothing else in the graph: neither a second result nor a check that nobody reads.
        if u is None or inner is not x or body | {*arguments, nodes[-1]} != set(nodes):
            continue
        features = u[1].out_features
        if features != (u[1] if v is None else v[1]).in_features:
            continue
        if v is not None and v[1].out_features != u[1].in_features:
            continue
        places = arguments.index(x0), arguments.index(x)
        names = str(arguments[0].target), str(arguments[1].target)
        if any(name.startswith("*") or node.args for name, node in zip(names, arguments, strict=True)):
            continue  # collects arguments, or has a default
        return CrossSpec(x0=places[0], x=places[1], names=names, u=u[0], v=None if v is None else v[0])
    return None


def _other(node: fx.Node, functions: set[object], methods: set[str], one: fx.Node) -> fx.Node | None:
    """b of node = one . b or b . one, where the operation is among those; None otherwise."""
    known = node.target in (functions if node.op == "call_function" else methods)
    if node.op not in ("call_function", "call_method") or not known or node.kwargs or len(node.args) != 2:
        return None
    left, right = node.args
    in_place = node.target in (operator.iadd, operator.imul) or str(node.target).endswith("_")
    if left is one and isinstance(right, fx.Node) and right is not one:
        return None if in_place else right  # in place it would write into an argument
    if right is one and isinstance(left, fx.Node) and left is not one:
        return left
    return None


def _linear(node: fx.Node, module: nn.Module) -> tuple[str, nn.Linear] | None:
    if node.op != "call_module" or node.kwargs or len(node.args) != 1:
        return None
    path = str(node.target)
    found = module.get_submodule(path)
    return (path, found) if type(found) is nn.Linear else None


def _argument(node: fx.Node) -> fx.Node | None:
    argument = node.args[0] if node.args else None
    return argument if isinstance(argument, fx.Node) else None
