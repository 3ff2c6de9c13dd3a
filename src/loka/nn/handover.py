"""Serving a stack of cross layers and the chain that alone reads it as one: x_L exists in FP8 only.

    apart       x_L written in bfloat16, read, written in FP8, read by the chain's first GEMM
    together    x_L written in FP8 by the stack's last GEMM, under the scale of the chain's input

The stack's first module then returns the chain's result, and every module after it passes that on
(nn/chain.py: as inside of a chain). What both compute stays the same but for one rounding: FP8 is
cast from the float32 sums, not from their bfloat16.

Together only where nobody could tell: in evaluation, without gradients, and without a hook that would
see the wrong tensor. That is decided when the stack is called. When the chain's turn comes, it raises if
it is called under another grad mode or dtype than the stack was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from loka.core.exceptions import NotConverted
from loka.nn.chain_state import RunningChain, running_chain, running_cross
from loka.nn.chain_steps import quantize_input, run_links, split_parameters
from loka.nn.cross_ops import serve
from loka.nn.cross_state import RunningCross


def join_readers(
    crosses: Iterable[RunningCross], chains: Iterable[RunningChain], modules: Mapping[str, nn.Module]
) -> None:
    """Makes each of `crosses` that feeds one of `chains` be served with it.

    `modules` are all of the model's, by path.
    """
    for running in crosses:
        for reader in chains:
            if running.stack.feeds(reader.chain):
                running.reader = reader
                running.between = _between(running, reader, modules)
                reader.fed = True


def _between(
    running: RunningCross, reader: RunningChain, modules: Mapping[str, nn.Module]
) -> tuple[nn.Module, ...]:
    """The modules whose hooks may see x_L: those of the stack, the chain's first one, and what holds
    either but not both."""
    stack = [set(_upward(path)) for path in running.stack.paths]
    head = set(_upward(reader.chain.paths[0]))
    common = set.intersection(head, *stack)
    return tuple(modules[path] for path in sorted(set.union(head, *stack) - common))


def _upward(path: str) -> list[str]:
    """`path` and the paths of all modules that hold it: "a.b", "a" and "" for "a.b"."""
    names = path.split(".")
    return [".".join(names[:count]) for count in range(len(names) + 1)]


def reader_of(running: RunningCross, x0: torch.Tensor) -> RunningChain | None:
    """The chain to serve together with a stack that is called now, with x_0 in the dtype it computes in.

    None: to run them apart. That nobody wants gradients of the stack is for the caller to know.
    """
    reader = running.reader
    if reader is None or x0.dtype != _dtype_of(reader, x0.device) or _wants_gradients(reader):
        return None
    for module in running.between:
        if module.training or module._forward_hooks or module._forward_pre_hooks:
            return None
    everywhere = torch.nn.modules.module
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return None
    return reader


def is_result(running: RunningChain, input: torch.Tensor) -> bool:
    """Whether what a chain's first module was given is the chain's result, computed with a stack before it.

    Raises NotConverted if it is, and the chain is called with gradients or in another dtype than the stack.
    """
    if not running.fed or input.shape[-1] != running.chain.links[-1].out_features:
        return False
    compiling = torch.compiler.is_compiling()
    if not compiling and input.data_ptr() != running.last:
        return False
    if _wants_gradients(running) or input.dtype != _dtype_of(running, input.device):
        raise NotConverted(
            f"the chain at {running.chain.name} ran together with the cross layers before it, without "
            f"gradients and in {input.dtype}; it is called with gradients, or in another dtype",
            why=["cross layers that are called in evaluation and without gradients run their chain, too"],
            way_out="call both under the same grad mode and autocast, or model.train() to run them apart",
        )
    return True


def serve_with(
    running: RunningCross, reader: RunningChain, x0: torch.Tensor, x: torch.Tensor | None
) -> torch.Tensor:
    """The chain's result [T, out] of what the stack makes of x_0 and x [T, N]; None: x is x_0."""
    given = x0.new_empty(0) if x is None else x
    handle, parameters = running.state.handle, running.parameters()
    # Not two autograd functions: that nobody wants a gradient is why both may run as one.
    return serve_together(
        x0, given, parameters, reader.parameters(), handle, running.place, reader.place, x is None
    )


def _dtype_of(running: RunningChain, device: torch.device) -> torch.dtype:
    """What a chain that is called now computes in, outside of FP8."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return running.linear(0).weight.dtype


def _wants_gradients(running: RunningChain) -> bool:
    return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in running.parameters())


@torch.library.custom_op("loka::serve_together", mutates_args=())
def serve_together(
    x0: torch.Tensor,
    x: torch.Tensor,
    crossed: list[torch.Tensor],
    chained: list[torch.Tensor],
    handle: int,
    cross: int,
    chain: int,
    joint: bool,
) -> torch.Tensor:
    """The chain's result [T, out] of what the stack makes of x_0 and x [T, N], at the places `cross` and
    `chain` of the model `handle`, with the parameters of both. `joint`: x is x_0, the argument is not read.

    Whether x_L is handed over in FP8 is decided here, when it runs: not where the stack is served as it
    is trained, and not while, or where, the chain's scale is taken from the values at hand.
    """
    stack, reader = running_cross(handle, cross), running_chain(handle, chain)
    x = x0 if joint else x
    stack.state.begin(stack, training=False)
    slot = reader.inputs[0]
    assert slot is not None, "what a chain reads without a norm before it has no bound"
    current = reader.current_scales()
    scale = None if current is not None or reader.state.calibrating(slot) else reader.input_scale(0)
    last = serve(stack, x0, x, crossed, scale_out=scale)
    low = last.row
    if low is None:
        assert last.hp is not None, "one of both was written"
        low, _ = quantize_input(reader, last.hp, current, training=False, keep=False)
    _, links = split_parameters(reader.chain, chained)
    out, _ = run_links(reader, low, x.shape[0], x.dtype, links, current, training=False)
    reader.last = out.data_ptr()
    return out


@serve_together.register_fake
def _(
    x0: torch.Tensor,
    x: torch.Tensor,
    crossed: list[torch.Tensor],
    chained: list[torch.Tensor],
    handle: int,
    cross: int,
    chain: int,
    joint: bool,
) -> torch.Tensor:
    return x0.new_empty(x0.shape[0], running_chain(handle, chain).chain.links[-1].out_features)
