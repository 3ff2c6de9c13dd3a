"""FP8 copies of all the weights of a compiled graph, by one op without state.

What a copy is, and the twin of the kernels in plain PyTorch: weight_copies.py. On CUDA two launches serve up
to 16 weights of one dtype (kernels/quantize/triton/fp8_weights.py). On a CPU, and for weights without
elements, it is the twin, which is bit-equal.
"""

from collections.abc import Sequence

import torch

from loka.core.problem import FLOATS, round_up
from loka.kernels.custom_op import registered
from loka.kernels.quantize.weight_copies import FP8, NAN_BYTE, SIDE, Copies, bits_of_scale, quantize_weight, unwritten

GROUP = 16  # weights that a launch serves: more would only lengthen its list of arguments


def groups_of(weights: Sequence[torch.Tensor]) -> list[list[int]]:
    """Indices of weights that launches serve together: of one dtype, up to `GROUP`, none without elements."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, weight in enumerate(weights):
        if weight.numel():
            by_dtype.setdefault(weight.dtype, []).append(index)
    return [indices[begin : begin + GROUP] for indices in by_dtype.values() for begin in range(0, len(indices), GROUP)]


def _check(weights: Sequence[torch.Tensor], transposed: Sequence[bool]) -> None:
    if len(weights) != len(transposed):
        raise ValueError(f"{len(weights)} weights, but {len(transposed)} values of `transposed`: give as many")
    for index, weight in enumerate(weights):
        if weight.dim() != 2:
            raise ValueError(f"weight {index} has shape {tuple(weight.shape)}: give matrices [N, K]")
        if weight.dtype not in FLOATS:
            raise ValueError(f"weight {index} is {weight.dtype}: give one of {', '.join(map(str, FLOATS))}")
        if weight.device != weights[0].device:
            raise ValueError(f"weight {index} is on {weight.device}, weight 0 on {weights[0].device}")


def _flat(copies: Sequence[Copies]) -> list[torch.Tensor]:
    return [tensor for each in copies for tensor in each]


def _fp8_weights(weights: Sequence[torch.Tensor], transposed: Sequence[bool]) -> list[torch.Tensor]:
    """row, column and scale (`Copies`) of each weight [N, K] in turn; column [0] where not `transposed`.

    Weights are bfloat16, float16 or float32 with any strides, on one device. No result shares memory with
    another, and nothing synchronizes.
    """
    _check(weights, transposed)
    pairs = list(zip(weights, transposed, strict=True))
    if not weights[0].is_cuda:
        return _flat([quantize_weight(weight, transposed=turn) for weight, turn in pairs])
    from loka.kernels.quantize.triton.fp8_weights import quantize_weights_fused

    copies = [(unwritten if weight.numel() else quantize_weight)(weight, transposed=turn) for weight, turn in pairs]
    for indices in groups_of(weights):
        quantize_weights_fused([weights[index] for index in indices], [copies[index] for index in indices])
    return _flat(copies)


def _fp8_weights_fake(weights: Sequence[torch.Tensor], transposed: Sequence[bool]) -> list[torch.Tensor]:
    _check(weights, transposed)
    return _flat([unwritten(weight, transposed=turn) for weight, turn in zip(weights, transposed, strict=True)])


def room_for_rows(weight: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K] for `cast_rows` to write to, with memory behind it up to a multiple of 16 rows."""
    rows, columns = weight.shape
    return torch.empty(round_up(rows, SIDE), columns, dtype=torch.uint8, device=weight.device)[:rows]


def cast_rows(
    weights: Sequence[torch.Tensor],
    rows: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    largest: torch.Tensor,
    indices: Sequence[int],
) -> None:
    """FP8 bytes of matrices [N, K] whose largest magnitudes are known, as shards have those of whole weights.

    Args:
        rows: `room_for_rows` of each.
        scales: float32, of at least as many elements as a side of the matrix, padded to 16; some are written over,
            by the scale of that maximum.
        largest: float32, the maximum of each at its index in `indices`; infinity, for what is not finite, makes all
            of its bytes NaN.
    """
    on_gpu = [w.is_cuda and w.shape[1] % SIDE == 0 and w.dtype in FLOATS for w in weights]
    for index, weight in enumerate(weights):
        if not on_gpu[index]:
            scale = bits_of_scale(largest[indices[index]]).view(torch.float32)
            low = (weight.float() / scale).to(FP8).view(torch.uint8)
            rows[index].copy_(torch.where(scale.isnan(), NAN_BYTE, low))
    fused = [index for index, fits in enumerate(on_gpu) if fits]
    for group in groups_of([weights[index] for index in fused]):
        from loka.kernels.quantize.triton.fp8_weights import cast_rows_fused

        own = [fused[index] for index in group]
        cast_rows_fused(
            [weights[index] for index in own],
            [rows[index] for index in own],
            [scales[index] for index in own],
            largest,
            [indices[index] for index in own],
        )


fp8_weights = registered("loka::fp8_weights", _fp8_weights, _fp8_weights_fake)
