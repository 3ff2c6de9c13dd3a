"""A stand-in for a weight that is not in memory: a tensor of its shape that nothing can be computed with.

The meta device alone does not do: torch's `mm`, `addmm` and `linear` accept a weight on it beside rows on another
device, and return whatever the memory holds.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_METHODS = "__repr__ detach dim element_size is_complex is_floating_point numel requires_grad_ size stride"
_PROPERTIES = (
    "device dtype grad grad_fn is_leaf is_meta is_nested is_quantized is_sparse layout ndim requires_grad shape"
)
_ASKED = frozenset(
    [getattr(torch.Tensor, name) for name in _METHODS.split()]
    + [getattr(torch.Tensor, name).__get__ for name in _PROPERTIES.split()]
    + [torch.Tensor.requires_grad.__set__]  # type: ignore[attr-defined]
)


class _Absent:
    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in _ASKED:
            raise NotImplementedError(f"{getattr(func, '__name__', func)} of a weight on the meta device")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self  # it holds nothing


class AbsentParameter(_Absent, nn.Parameter):
    pass


class AbsentBuffer(_Absent, torch.Tensor):
    pass


def absent(tensor: torch.Tensor) -> torch.Tensor:
    """A stand-in for the tensor. It raises NotImplementedError on everything but questions about its form, and
    `is_meta` is true.
    """
    if isinstance(tensor, _Absent):
        return tensor
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return AbsentParameter(empty, requires_grad=False)
    return empty.as_subclass(AbsentBuffer)


def for_compilers(tree: nn.Module) -> None:
    """Replaces stand-ins by plain tensors on the meta device, which compilers refuse by themselves because of the
    device.
    """
    for module in tree.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if isinstance(tensor, _Absent):
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                    held[name] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
