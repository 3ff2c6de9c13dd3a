"""Which layers feed which, through code alone that a compiled region takes between two GEMMs (compiler/edges).

The links are read off the autograd graph of a sampled step: from the input of a layer back to the outputs of others,
over nodes of pointwise code, norms and views. A node that is not known ends a link, so a link may be missing but is
never false. `loka.regions` tells where the pass then does not join a region.
"""

from typing import Any

import torch

_MOST = 256
"""Nodes that are looked at behind one input: residuals branch."""

_TAKEN = {
    "Add", "Sub", "Rsub", "Mul", "Div", "Neg", "Abs", "Exp", "Log", "Sqrt", "Rsqrt", "Reciprocal", "Sigmoid",
    "Tanh", "Erf", "Relu", "Silu", "Gelu", "Hardswish", "Hardsigmoid", "Hardtanh", "LeakyRelu", "Where",
    "Clamp", "ClampMin", "ClampMax", "Pow", "Mean", "Sum", "NativeLayerNorm", "FusedRmsNorm", "View",
    "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Expand", "Alias", "Clone", "ToCopy",
}  # fmt: skip


class Links:
    """Of one forward pass; it keeps the graph's nodes, so forget it when the pass ends."""

    def __init__(self) -> None:
        self._made: dict[Any, tuple[str, int]] = {}

    def behind(self, x: torch.Tensor) -> set[str]:
        """The layers that feed `x` [.., K] and have as many rows, of those noted so far."""
        found = set[str]()
        waiting, seen = [x.grad_fn], set[Any]()
        while waiting and len(seen) < _MOST:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in self._made:
                path, rows = self._made[node]
                found |= {path} if rows == _rows(x) else set()
            elif node.name().rstrip("0123456789").removesuffix("Backward") in _TAKEN:
                waiting += [before for before, _ in node.next_functions]
        return found

    def note(self, path: str, output: torch.Tensor) -> None:
        """That the layer at `path` made `output` [.., N]. A nested one tells no sides, and links nothing."""
        if output.grad_fn is not None and not output.is_nested:
            self._made[output.grad_fn] = path, _rows(output)


def _rows(x: torch.Tensor) -> int:
    return x.numel() // max(x.shape[-1], 1)
