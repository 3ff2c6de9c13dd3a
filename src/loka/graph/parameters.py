"""A function mode that knows which tensors are parameters, or views of them, while a module runs.

Tensors are compared as objects. Views are known by the call that made them, so that torch.compile, which
traces the mode, finds the same ones as an eager step.
"""

import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from loka.graph.aliases import seen_as
from loka.graph.gemm_calls import GEMMS, GemmCall, gemm_of
from loka.graph.views import TRANSPOSED, VIEWS, view_key


class _Again:
    """A checkpointed function that enters the mode by itself.

    Dynamo hands calls of `checkpoint` to function modes, as eager torch does not, and traces what is inside
    with the mode taken off: its GEMMs would run in high precision.
    """

    def __init__(self, again: Callable[[], AbstractContextManager[Any]], function: Callable[..., Any]) -> None:
        self.again, self.function = again, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.again():
            return self.function(*args, **kwargs)


class ParameterMode(TorchFunctionMode):
    """Calls `multiply` for each GEMM of a known tensor, and otherwise what was called.

    `known` holds tensors with their keys: a parameter's name, then how the view was made. `watches`: it only
    looks on, and wants to see gradients too.
    """

    watches = False

    def __init__(self, known: list[tuple[torch.Tensor, str]]) -> None:
        super().__init__()
        self.known = known
        self.again: Callable[[], AbstractContextManager[Any]] | None = None  # entered in a recomputation

    def multiply(self, key: str, call: GemmCall, func: Any, args: Any, kwargs: Any) -> Any:
        """What `func` returns for a GEMM of the weight `key`; abstract."""
        raise NotImplementedError

    def wants(self, key: str) -> bool:
        """Whether a GEMM of this view, or of a view of it, is to be found."""
        return True

    def key_of(self, tensor: Any) -> str | None:
        for known, key in self.known:
            if known is tensor:
                return key
        return None

    def note(self, tensor: torch.Tensor, key: str) -> None:
        self.known.append((tensor, key))

    def is_weight(self, tensor: Any) -> bool:
        return self.key_of(tensor) is not None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:  # torch takes the mode off while it is asked; the GEMMs are inside
                return _attention(*args, **kwargs)
        if func is torch.Tensor.unflatten:  # written in Python with super(), which dynamo cannot trace
            return args[0].unflatten(*args[1:], **kwargs)
        if torch.compiler.is_dynamo_compiling() and (func in GEMMS or func in VIEWS):
            self._find_unseen(args)
        if func in GEMMS:
            call = gemm_of(func, args, kwargs, self.is_weight)
            key = None if call is None else self.key_of(call.source)
            if call is not None and key is not None:
                return self.multiply(key, call, func, args, kwargs)
            return func(*args, **kwargs)
        if func is checkpoint and args and self.again is not None:
            return func(_Again(self.again, args[0]), *args[1:], **kwargs)
        if func in VIEWS and args:
            key = self.key_of(args[0])
            if key is not None:
                return self._view(key, func, args, kwargs)
        return func(*args, **kwargs)

    def _find_unseen(self, args: tuple[Any, ...]) -> None:
        """Notes operands that are `.T`, `.mT` or items of known tensors: the last view that a site reads."""
        for operand in args:
            if not isinstance(operand, torch.Tensor) or operand.dim() < 2 or self.is_weight(operand):
                continue
            for known, key in reversed(self.known):
                if known.dim() >= operand.dim():
                    added = seen_as(operand, known)
                    ways = () if added is None else (key + added + 2 * TRANSPOSED, key + added)
                    if wanted := next((way for way in ways if self.wants(way)), None):
                        self.note(operand, wanted)
                        break

    def _view(self, key: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        added = view_key(func, args, kwargs)
        if added is None:
            return out
        if isinstance(out, (tuple, list)):
            for place, part in enumerate(out):
                self.note(part, f"{key}{added}[{place}]")
        elif isinstance(out, torch.Tensor) and out is not args[0]:
            self.note(out, key + added)
        return out


# Where a graph breaks inside of a module, torch calls the mode for what runs in between. Dynamo would compile that call
# by itself, and what it calls; its guards take getters of a tensor for one another, so that `grad_fn` came out as
# `requires_grad`. Inside of a graph the mode is traced all the same.
set_code_exec_strategy(
    ParameterMode.__torch_function__.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
)

# The function's own code, without the question that would hand it to the mode again.
_attention = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.__dict__, "has_torch_function": lambda *_: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)
_attention.__kwdefaults__ = F.multi_head_attention_forward.__kwdefaults__
