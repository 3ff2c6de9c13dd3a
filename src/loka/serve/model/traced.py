"""A model's call as one graph: its Python runs once over tensors without values, and Inductor compiles what it does.

Dynamo reads the same call's bytecode and guards all that it saw, which takes four to seven times as long (docs/log.md);
a CUDA graph of the call holds on to all that without asking. What the graph must not hold on to are the tensors that
versions differ in: they are its arguments, so that code that asks one of them for a number fails. And before it is
compiled the graph answers the same rows, op by op, with the bits of the model's own call, as does one that was written
down when the model was frozen (written.py).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from loka.core.compiling import mend_compilers
from loka.serve.model.written import WrittenGraph, read, written
from loka.serve.rows import leaves, mapped
from loka.serve.watch.agreement import same_bits

Call = Callable[[Sequence[torch.Tensor], Mapping[str, torch.Tensor]], Any]
"""Of the rows' tensors, and of those that the model holds, by name."""
Ops = Mapping[Any, Callable[..., Any]]


@dataclass(frozen=True)
class Traced:
    """`program` of the rows' tensors and then of `constants`: by which name each is held, or, held nowhere, itself.
    `written`: its graph, where that has a text."""

    program: Callable[..., Sequence[torch.Tensor]]
    constants: tuple[str | torch.Tensor, ...]
    output: Any
    likeness: tuple[object, ...]
    written: WrittenGraph | None

    def __call__(self, rows: Sequence[torch.Tensor], held: Mapping[str, torch.Tensor]) -> Any:
        """What the call returns for `rows` with the tensors of `held`, which are like those that it was traced with."""
        constants = [held[each] if isinstance(each, str) else each for each in self.constants]
        with torch.autocast(rows[0].device.type, enabled=False):  # its casts are in the graph
            made = iter(self.program(*rows, *constants))
        return mapped(self.output, lambda _: next(made))


def without_values(tensor: torch.Tensor) -> bool:
    from torch._subclasses import FakeTensor

    return isinstance(tensor, FakeTensor)


def likeness(held: Mapping[str, torch.Tensor]) -> tuple[object, ...]:
    """What compiled code knows of tensors: their forms, and which of them are one."""
    first: dict[int, str] = {}
    return tuple(
        (name, first.setdefault(id(each), name), each.dtype, each.device, each.shape, each.stride())
        for name, each in held.items()
    )


@torch.no_grad()
def traced(
    call: Call,
    rows: Sequence[torch.Tensor],
    held: Mapping[str, torch.Tensor],
    *,
    answer: Any,
    ops: Ops,
    tracing: AbstractContextManager[Any],
) -> Traced:
    """The call compiled for rows of these shapes.

    Args:
        answer: what the model answers `rows`.
        ops: what runs in the place of ops of the graph, where that is to answer the same.
        tracing: entered while the model's Python runs.

    Raises what the call raises for tensors that have no values: it asks for some, or hands one to what is no op. And
    ValueError for a graph that answers otherwise.
    """
    from torch._dynamo.convert_frame import compile_lock
    from torch._subclasses import FakeTensorMode
    from torch.fx import _symbolic_trace
    from torch.fx._lazy_graph_module import _use_lazy_graph_module
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mend_compilers()
    sizes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)  # no size may depend on values
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes, static_shapes=True)
    named: dict[int, str] = {}
    one = {name: each for name, each in held.items() if named.setdefault(id(each), name) == name}
    places = {name: place for place, name in enumerate(one)}

    def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
        _symbolic_trace._is_fx_tracing_flag = False  # of the process: compiled functions of other threads would raise
        own = tensors[len(rows) :]
        return leaves(call(tensors[: len(rows)], {name: own[places[named[id(each)]]] for name, each in held.items()}))

    # Two threads would undo each other's patches of nn.Module, which tracers make. As under Dynamo, Python is written
    # for graphs that are called alone: a fifth of a bucket's time where compiled code lies in caches.
    with compile_lock, _use_lazy_graph_module(True):
        given = [fake.from_tensor(each) for each in (*rows, *one.values())]
        with fake, tracing:
            module = make_fx(flat, _disable_torch_fn_metadata_mode=True)(*given)
        names, graph = _without_unread(module, len(rows), list(one)), None
        if not (own := _lifted(module)):
            graph = written(module, [_names_of(held[name], held) for name in names], rows[0].device)
            module = module if graph is None else read(graph, rows[0].device)  # compiled as it will be where it is read
        return _made(module, rows, held, names, own, answer, ops, graph)


@torch.no_grad()
def recalled(
    graph: WrittenGraph, rows: Sequence[torch.Tensor], held: Mapping[str, torch.Tensor], *, answer: Any, ops: Ops
) -> Traced:
    """As `traced`, by a graph that was written for as many rows.

    Raises ValueError for one that cannot be read, and whatever ops raise that do not fit, where it answers otherwise.
    """
    from torch._dynamo.convert_frame import compile_lock
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    mend_compilers()
    for names in graph.reads:
        if names[0] not in held or names != _names_of(held[names[0]], held):
            raise ValueError(f"it reads {names[0]}, which this model does not hold, or holds by other names")
    with compile_lock, _use_lazy_graph_module(True):
        module = read(graph, rows[0].device)
        return _made(module, rows, held, [names[0] for names in graph.reads], [], answer, ops, graph)


def _names_of(tensor: torch.Tensor, held: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    return tuple(name for name, each in held.items() if each is tensor)


def _made(
    module: GraphModule,
    rows: Sequence[torch.Tensor],
    held: Mapping[str, torch.Tensor],
    names: Sequence[str],
    own: Sequence[torch.Tensor],
    answer: Any,
    ops: Ops,
    graph: WrittenGraph | None,
) -> Traced:
    """Checked and compiled. `names`: what it reads of `held`; `own`: tensors that it alone holds, behind those."""
    constants = [*(held[name] for name in names), *own]
    _check(module, [*(each.clone() for each in rows), *constants], leaves(answer), ops)
    return Traced(
        program=_compiled(module, [*rows, *constants]),
        constants=(*names, *own),
        output=mapped(answer, lambda leaf: torch.empty(0)),
        likeness=likeness(held),
        written=graph,
    )


def _without_unread(module: GraphModule, rows: int, names: Sequence[str]) -> list[str]:
    """Takes arguments behind the first `rows` that nothing reads out of the graph; names of those that stay."""
    kept = []
    for name, node in zip(names, module.graph.find_nodes(op="placeholder")[rows:], strict=True):
        if node.users:
            kept.append(name)
        else:
            module.graph.erase_node(node)
    return kept


def _lifted(module: GraphModule) -> list[torch.Tensor]:
    """Makes arguments, behind the others, of the tensors that the graph holds itself; returns them in their order.

    Numbers of the host, as `torch.tensor(2.0)` makes them, stay in the graph."""
    graph = module.graph
    found: dict[int, tuple[torch.Tensor, Node]] = {}
    last = graph.find_nodes(op="placeholder")[-1]
    for node in graph.find_nodes(op="get_attr"):
        value = getattr(module, str(node.target))
        if not isinstance(value, torch.Tensor) or (value.dim() == 0 and value.device.type == "cpu"):
            continue
        if id(value) not in found:
            with graph.inserting_after(last):
                last = graph.placeholder(f"constant_{len(found)}")
            last.meta.update(node.meta)
            found[id(value)] = value, last
        node.replace_all_uses_with(found[id(value)][1])
        graph.erase_node(node)
    module.recompile()
    return [value for value, _ in found.values()]


class _OpByOp(Interpreter):
    def __init__(self, module: GraphModule, ops: Ops) -> None:
        super().__init__(module)
        self._ops = ops

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._ops.get(target, target)(*args, **kwargs)


def _check(module: GraphModule, given: list[torch.Tensor], expected: Sequence[torch.Tensor], ops: Ops) -> None:
    with torch.autocast(given[0].device.type, enabled=False):
        made = _OpByOp(module, ops).run(*given)
    alike = [same_bits(one, other) for one, other in zip(made, expected, strict=True)]
    if not all(alike):
        raise ValueError(f"of its outputs {alike.count(False)} are others without values")


def _compiled(module: GraphModule, given: Sequence[torch.Tensor]) -> Any:
    """For these very shapes. Caches ask for a ShapeEnv."""
    from torch._inductor.compile_fx import compile_fx
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    fake = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    with torch.autocast(given[0].device.type, enabled=False):
        return compile_fx(module, [fake.from_tensor(each) for each in given])
