"""Modules whose whole forward is one GEMM with their own weight. Their replacement calls the site directly.

    nn.Linear   y = x W^T + b,  W [N, K]      Conv1D of Hugging Face  y = x W + b,  W [K, N]
    nn.Conv1d with a kernel of one            every position is a row

No function mode is entered for them, which saves host time and compiles inside activation checkpoints.
"""

import torch
from torch import nn

from loka.nn.site import Site, SiteForward
from loka.nn.unwrap import weight_of


def with_bias(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """y + bias in the dtype of y, which autocast may have made narrower than the bias."""
    return y if bias is None else y + bias.to(y.dtype)


class LinearForward(SiteForward):
    """Of nn.Linear, and of classes that inherit its forward (FSDP2's, parametrized ones)."""

    def __init__(self, module: nn.Module, sites: list[Site]) -> None:
        super().__init__(module, sites)
        (self.site,) = sites

    @property
    def weight(self) -> torch.Tensor:
        return self.module.weight  # type: ignore[return-value]

    @property
    def bias(self) -> torch.Tensor | None:
        return self.module.bias  # type: ignore[return-value]

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        if input.is_nested:
            return _rows_of_nested(self, input)
        return with_bias(self.site(input, self.weight), self.bias)


class Conv1DForward(LinearForward):
    """Of transformers.pytorch_utils.Conv1D, whose weight lies as [K, N]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return with_bias(self.site(x, self.weight.t()), self.bias)


class PointwiseForward(LinearForward):
    """Of nn.Conv1d with a kernel of one: [B, K, positions] -> [B, N, positions], or without B."""

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        y = self.site(input.mT, self.weight.flatten(1))
        return with_bias(y, self.bias).mT.contiguous()  # as nn.Conv1d returns it


def _rows_of_nested(forward: LinearForward, input: torch.Tensor) -> torch.Tensor:
    """Each sequence of a nested tensor is rows; nn.TransformerEncoder packs padded ones so, in inference."""
    if input.layout is torch.jagged:
        values = forward(input.values())
        return torch.nested.nested_tensor_from_jagged(values, input.offsets(), jagged_dim=1)  # type: ignore[attr-defined]
    parts = input.unbind()
    packed = forward(torch.cat(parts)).split([part.shape[0] for part in parts])
    return torch.nested.as_nested_tensor(list(packed), layout=input.layout)


def leaf_forward(module: nn.Module) -> type[LinearForward] | None:
    """The class that may replace the forward of `module`, or None where it is no such module."""
    if "forward" in module.__dict__ or not isinstance(weight_of(module), torch.Tensor):
        return None
    own = type(module).forward
    if own is nn.Linear.forward:
        return LinearForward
    if type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils":
        return Conv1DForward
    if own is nn.Conv1d.forward and isinstance(module, nn.Conv1d) and _is_pointwise(module):
        return PointwiseForward
    return None


def _is_pointwise(module: nn.Conv1d) -> bool:
    one = module.kernel_size == (1,) and module.stride == (1,) and module.groups == 1
    return one and module.padding in ((0,), "valid", "same")
