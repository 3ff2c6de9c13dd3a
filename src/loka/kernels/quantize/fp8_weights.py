"""FP8 copies of all the weights of a compiled graph, by one op without state.

What a copy is, and the twin of the kernels in plain PyTorch: weight_copies.py. On CUDA two launches serve up
to 16 weights of one dtype (kernels/quantize/triton/fp8_weights.py). On a CPU, and for weights without
elements, it is the twin, which is bit-equal.
"""

from collections.abc import Sequence

import torch

from loka.kernels.custom_op import registered
from loka.kernels.launches import note_launch
from loka.kernels.quantize.weight_copies import Copies, quantize_weight, unwritten

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GROUP = 16  # weights that a launch serves: more would only lengthen its list of arguments


def groups_of(weights: Sequence[torch.Tensor]) -> list[list[int]]:
    """Places of weights that launches serve together: of one dtype, up to `GROUP`, none without elements."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for place, weight in enumerate(weights):
        if weight.numel():
            by_dtype.setdefault(weight.dtype, []).append(place)
    return [places[begin : begin + GROUP] for places in by_dtype.values() for begin in range(0, len(places), GROUP)]


def _check(weights: Sequence[torch.Tensor], transposed: Sequence[bool]) -> None:
    if len(weights) != len(transposed):
        raise ValueError(f"{len(weights)} weights, but {len(transposed)} values of `transposed`: give as many")
    for place, weight in enumerate(weights):
        if weight.dim() != 2:
            raise ValueError(f"weight {place} has shape {tuple(weight.shape)}: give matrices [N, K]")
        if weight.dtype not in DTYPES:
            raise ValueError(f"weight {place} is {weight.dtype}: give one of {', '.join(map(str, DTYPES))}")
        if weight.device != weights[0].device:
            raise ValueError(f"weight {place} is on {weight.device}, weight 0 on {weights[0].device}")


def _flat(copies: Sequence[Copies]) -> list[torch.Tensor]:
    return [tensor for each in copies for tensor in each]


def _fp8_weights(weights: Sequence[torch.Tensor], transposed: Sequence[bool]) -> list[torch.Tensor]:
    """row, column and scale (`Copies`) of each weight [N, K] in turn; column [0] where not `transposed`.

    Weights are bfloat16, float16 or float32 with any strides, on one device. No result shares memory with
    another, and nothing synchronizes.
    """
    _check(weights, transposed)
    groups = groups_of(weights)
    for _ in groups:
        note_launch("weights")
    pairs = list(zip(weights, transposed, strict=True))
    if not weights[0].is_cuda:
        return _flat([quantize_weight(weight, transposed=turn) for weight, turn in pairs])
    from loka.kernels.quantize.triton.fp8_weights import quantize_weights_fused

    copies = [(unwritten if weight.numel() else quantize_weight)(weight, transposed=turn) for weight, turn in pairs]
    for places in groups:
        quantize_weights_fused([weights[place] for place in places], [copies[place] for place in places])
    return _flat(copies)


def _fp8_weights_fake(weights: Sequence[torch.Tensor], transposed: Sequence[bool]) -> list[torch.Tensor]:
    _check(weights, transposed)
    return _flat([unwritten(weight, transposed=turn) for weight, turn in zip(weights, transposed, strict=True)])


fp8_weights = registered("loka::fp8_weights", _fp8_weights, _fp8_weights_fake)
