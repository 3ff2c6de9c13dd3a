"""A model's call as one graph: its Python runs once over tensors without values, and Inductor compiles what it does.

Dynamo reads the same call's bytecode and guards all that it saw, which takes four to seven times as long (docs/log.md);
a CUDA graph of the call holds on to all that without asking. The tensors of the model are read anew at each call.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from loka.core.compiling import mend_compilers
from loka.serve.rows import leaves, mapped

Call = Callable[[Sequence[torch.Tensor]], Any]
"""Of the rows' tensors."""


@dataclass(frozen=True)
class Traced:
    """`program` of the rows' tensors and then of `constants`: where each is held, or, held nowhere, the tensor."""

    program: Callable[..., Sequence[torch.Tensor]]
    constants: tuple[tuple[str, ...] | torch.Tensor, ...]
    output: Any
    likeness: tuple[object, ...]

    def __call__(self, rows: Sequence[torch.Tensor], held: Mapping[str, torch.Tensor]) -> Any:
        """What the call returns for `rows` with the tensors of `held`, which are like those that it was traced with."""
        constants = [each if isinstance(each, torch.Tensor) else held[each[0]] for each in self.constants]
        made = iter(self.program(*rows, *constants))
        return mapped(self.output, lambda _: next(made))


def likeness(held: Mapping[str, torch.Tensor]) -> tuple[object, ...]:
    """What compiled code knows of tensors: their forms, and which of them are one."""
    first: dict[int, str] = {}
    return tuple(
        (name, first.setdefault(id(each), name), each.dtype, each.device, each.shape, each.stride())
        for name, each in held.items()
    )


@torch.no_grad()
def traced(
    call: Call, rows: Sequence[torch.Tensor], held: Mapping[str, torch.Tensor], tracing: AbstractContextManager[Any]
) -> Traced:
    """The call compiled for rows of these shapes. `tracing` is entered while its Python runs.

    Raises what the call raises for tensors that have no values: it asks for some, or hands one to what is no op.
    """
    from torch._inductor.compile_fx import compile_fx
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # caches ask for one

    mend_compilers()
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
    outputs = []

    def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
        outputs.append(call(tensors))
        return leaves(outputs[-1])

    given = [fake.from_tensor(each) for each in rows]
    with fake, tracing:
        module = make_fx(flat, _disable_torch_fn_metadata_mode=True)(*given)
    constants = _lifted(module)
    with torch.autocast(rows[0].device.type, enabled=False):  # its casts are in the graph
        program: Any = compile_fx(module, [*given, *map(fake.from_tensor, constants)])
    places: dict[int, tuple[str, ...]] = {}
    for name, each in held.items():
        places[id(each)] = (*places.get(id(each), ()), name)
    return Traced(
        program=program,
        constants=tuple(places.get(id(each), each) for each in constants),
        output=mapped(outputs[-1], lambda leaf: torch.empty(0)),
        likeness=likeness(held),
    )


def _lifted(module: GraphModule) -> list[torch.Tensor]:
    """Makes arguments, behind the others, of the tensors that a graph holds; returns them in their order.

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
                last = graph.placeholder(f"held_{len(found)}")
            last.meta.update(node.meta)
            found[id(value)] = value, last
        node.replace_all_uses_with(found[id(value)][1])
        graph.erase_node(node)
    module.recompile()
    return [value for value, _ in found.values()]
