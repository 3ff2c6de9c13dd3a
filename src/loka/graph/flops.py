"""Counts all matmul FLOPs of a forward pass, so that what is no site has a name and a share.

    FLOPs of a GEMM = 2 M N K;   in backward as many again for each operand that needs a gradient

A dispatch mode below the function mode that knows the sites sees every kernel that multiplies, whoever calls it. It
does not count while the call of a site runs.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from loka.core.records.coverage import Uncovered

aten = torch.ops.aten


def _vector_flops(args: tuple[Any, ...], out: Any) -> float:
    return 2.0 * max(t.numel() for t in args if isinstance(t, torch.Tensor))


def _recurrent_flops(given: torch.Tensor, weights: Iterable[torch.Tensor]) -> float:
    """Every step of every sequence multiplies by each matrix once."""
    return 2.0 * given.shape[:-1].numel() * sum(weight.numel() for weight in weights if weight.dim() == 2)


def _trilinear_flops(args: tuple[Any, ...], out: Any) -> float:
    """Of nn.Bilinear: every combination of the three operands' sides."""
    shapes = []
    for tensor, expanded in zip(args[:3], args[3:6], strict=True):
        shape = list(tensor.shape)
        for side in sorted(expanded):
            shape.insert(side, 1)
        shapes.append(shape)
    return 2.0 * math.prod(torch.broadcast_shapes(*shapes))


_OWN: dict[Any, Callable[[tuple[Any, ...], Any], float]] = {
    aten.mv: _vector_flops,
    aten.addmv: _vector_flops,
    aten.dot: _vector_flops,
    aten.vdot: _vector_flops,
    aten._trilinear: _trilinear_flops,
    aten.mkldnn_rnn_layer: lambda args, out: _recurrent_flops(args[0], args[1:3]),
    aten._cudnn_rnn: lambda args, out: _recurrent_flops(args[0], args[1]),
}


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> float:
    """[..., H, S, D], [..., T, D], [..., T, V] -> 2 H S T (D + V); heads of the query may share keys."""
    return 2.0 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward_flops(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> float:
    """FLOPs for computing the scores again, and for the gradients of scores, values, query and key."""
    return 2.0 * math.prod(query.shape[:-1]) * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


def flop_formulas() -> Mapping[Any, Any]:
    """torch's, by op; but attention's, which torch lacks on a CPU (2.13), and of which it raises where heads of the
    query share keys (2.11)."""
    from torch.utils.flop_counter import flop_registry as known  # it imports triton: not when loka is imported

    own: dict[Any, Any] = {}
    for kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"):
        own[getattr(aten, f"_scaled_dot_product_{kind}")] = _attention_flops
        own[getattr(aten, f"_scaled_dot_product_{kind}_backward")] = _attention_backward_flops
    return {**known, **own}


# These keep the numbers of what they are given: a copy of a parameter is a parameter still.
_COPIES = {aten._to_copy, aten.clone, aten.contiguous, aten.copy}


class FlopAccount(TorchDispatchMode):
    """Counts the FLOPs outside of sites, by module and op.

    Args:
        parameters: of the model; tensors that alias or copy them count as parameters too.
        where: returns the path of the module that runs, and its class.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], where: Callable[[], tuple[str, str]]) -> None:
        super().__init__()
        self._registry = flop_formulas()
        self._where = where
        self._inside = 0
        self._kept = list(parameters)
        self._memory = {address for t in self._kept if (address := _address(t)) is not None}
        self._found: dict[tuple[str, str, str, bool], float] = {}

    @contextlib.contextmanager
    def site(self) -> Iterator[None]:
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def uncovered(self) -> tuple[Uncovered, ...]:
        return tuple(
            Uncovered(where=where, op=op, flops=flops, parameter=par, reason=_reason(kind, op, par))
            for (where, kind, op, par), flops in self._found.items()
        )

    def know(self, tensor: torch.Tensor) -> None:
        """Adds a parameter that was not there at first (FSDP2 gathers them)."""
        self._kept.append(tensor)
        address = _address(tensor)
        if address is not None:
            self._memory.add(address)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        if packet in _COPIES and isinstance(out, torch.Tensor) and _address(args[0]) in self._memory:
            self.know(out)
        if self._inside:
            return out
        flops = _flops_of(packet, args, kwargs, out, self._registry)
        if flops:
            operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.dim() > 1]
            parameter = any(_address(t) in self._memory for t in operands)
            graded = sum(t.requires_grad for t in operands[:2]) if torch.is_grad_enabled() else 0
            where, kind = self._where()
            key = (where, kind, packet.__name__, parameter)
            self._found[key] = self._found.get(key, 0.0) + flops * (1 + graded)
        return out


def _flops_of(
    packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, registry: Mapping[Any, Any]
) -> float:
    if packet in _OWN:
        return _OWN[packet](args, out)
    if packet in registry:
        return float(registry[packet](*args, **kwargs, out_val=out))
    return 0.0


def _address(tensor: Any) -> int | None:
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return None
    try:
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":  # meta and fake tensors: no memory, but views share an object
            return -storage._cdata
        return storage.data_ptr() or None
    except (RuntimeError, NotImplementedError):  # a subclass without storage
        return None


_RECURRENT = ("mkldnn_rnn_layer", "_cudnn_rnn")


def _reason(kind: str, op: str, parameter: bool) -> str:
    if kind in ("LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell") or op in _RECURRENT:
        return f"the steps of a recurrent layer ({kind}) run inside its own kernel"
    if "attention" in op:
        return "attention's own products, of two activations"
    if parameter:
        return f"a parameter reaches {op} in a way LoKA takes for no site"
    return "a product of two activations, or of weights that are computed"


def site_flops(rows: int, in_features: int, out_features: int) -> float:
    return 2.0 * rows * in_features * out_features
