"""Graphs of a model's calls as text: a server is loaded without running the model's Python without values again.

A graph is what `traced` made: ops of torch and of LoKA, the names by which a tree holds the tensors that it reads, and
numbers. It holds no tensor and no code. What cannot be written so is traced again.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from loka.core.storage.record_file import RecordFile

_KINDS = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}
"""By class: what is named by an attribute of torch."""


@dataclass(frozen=True, kw_only=True)
class WrittenGraph:
    """`reads`: the tensors that it takes behind the columns of the rows, each by all its names. `nodes`: name, op,
    arguments and options of each, the inputs first and the outputs, without a name, last."""

    reads: tuple[tuple[str, ...], ...]
    nodes: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class WrittenGraphs(RecordFile, kind="loka-serve-graphs", version=1, way_out="freeze the model and save it again"):
    """By the number of rows, as text. `code`: of what was traced (code.py)."""

    code: str
    graphs: Mapping[str, WrittenGraph]


def written(module: GraphModule, reads: Sequence[tuple[str, ...]], device: torch.device) -> WrittenGraph | None:
    """None for a graph that holds tensors, or ops and arguments that have no name."""
    try:
        nodes = tuple(_node(node, device) for node in module.graph.nodes)
    except (TypeError, ValueError):
        return None
    return WrittenGraph(reads=tuple(reads), nodes=nodes)


def read(graph: WrittenGraph, device: torch.device) -> GraphModule:
    """Its arguments are the columns of the rows, then what it reads.

    Raises ValueError for what `written` did not make, and for ops that this process does not know.
    """
    from torch.fx._lazy_graph_module import _make_graph_module

    made, known = Graph(), dict[str, Node]()
    try:
        for name, op, args, kwargs in graph.nodes:
            args, kwargs = (_read(each, known, device) for each in (args, kwargs))
            if op == "placeholder":
                known[name] = made.placeholder(name)
            elif op == "output":
                made.output(args[0])
            else:
                known[name] = made.create_node("call_function", _target(op), args, kwargs, name)
        made.lint()
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"a graph that cannot be read: {error!r}") from error
    return _make_graph_module(torch.nn.Module(), made, class_name="Call")


def _node(node: Node, device: torch.device) -> tuple[str, str, Any, Any]:
    if node.op == "placeholder":
        return node.name, "placeholder", _text((), device), _text({}, device)
    if node.op == "output":
        return "", "output", _text(node.args, device), _text({}, device)
    if node.op != "call_function":
        raise TypeError(node.op)
    if node.target is operator.getitem:
        target = "getitem"
    elif isinstance(node.target, torch._ops.OpOverload):
        _check_op(node.target)
        target = str(node.target)
    else:
        raise TypeError(str(node.target))
    return node.name, target, _text(node.args, device), _text(dict(node.kwargs), device)


def _target(name: str) -> Any:
    if name == "getitem":
        return operator.getitem
    namespace, op, overload = name.split(".")
    target = getattr(getattr(getattr(torch.ops, namespace), op), overload)
    _check_op(target)
    return target


def _check_op(op: torch._ops.OpOverload) -> None:
    """Raises ValueError for what makes tensors by a name, as of a file."""
    kinds = [str(each.type) for each in op._schema.arguments]
    if "str" in kinds and not any("Tensor" in kind for kind in kinds):
        raise ValueError(f"{op} reads from elsewhere")


def _text(value: Any, device: torch.device) -> Any:
    """Lists are tuples, lists or mappings by their first entry. Raises TypeError for what has no text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else ["float", str(value)]
    if isinstance(value, Node):
        return ["node", value.name]
    if isinstance(value, torch.device):
        return ["device", "" if value == device else str(value)]
    for kind, word in _KINDS.items():
        if isinstance(value, kind):
            return [word, str(value).removeprefix("torch.")]
    if isinstance(value, Mapping):
        return ["dict", *([_text(key, device), _text(each, device)] for key, each in value.items())]
    if isinstance(value, (list, tuple)):
        return ["list" if isinstance(value, list) else "tuple", *(_text(each, device) for each in value)]
    raise TypeError(f"{type(value).__qualname__} has no text")


def _read(value: Any, known: Mapping[str, Node], device: torch.device) -> Any:
    if not isinstance(value, (list, tuple)):
        return value
    kind, *rest = value
    if kind == "node":
        return known[rest[0]]
    if kind == "float":
        return float(rest[0])
    if kind == "device":
        return torch.device(rest[0]) if rest[0] else device
    if kind in _KINDS.values():
        return getattr(torch, rest[0])
    each = [_read(one, known, device) for one in rest] if kind != "dict" else []
    if kind == "dict":
        return {_read(key, known, device): _read(one, known, device) for key, one in rest}
    if kind == "list":
        return each
    if kind == "tuple":
        return tuple(each)
    raise ValueError(f"{kind!r} is no kind of argument")
