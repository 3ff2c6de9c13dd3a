"""INT8 copies of the weights of a compiled graph, by one op without state.

    scale = max of |W| over a row / 127,   row = integer(W (1 / scale))        recipe `int8_row`

On CUDA a launch serves up to 16 weights of one dtype (kernels/quantize/triton/int8_weights.py), whose rows
lie in memory side by side; elsewhere it is the twin, core/numerics/reference.py, which is bit-equal.
"""

from collections.abc import Sequence

import torch

from loka.core.recipe import Cast, Format, Granularity
from loka.kernels.custom_op import registered
from loka.kernels.quantize.fp8_weights import groups_of
from loka.kernels.quantize.quantizer import quantize_pair
from loka.kernels.quantize.side import Side
from loka.kernels.quantize.weight_copies import padded_sides

CAST = Cast(Format.INT8, Granularity.ROW)


def _int8_weights(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of each weight [N, K] in turn row int8 [N16, K16], padded with zeros to multiples of 16, and scale
    float32 [N16]; that of a row which is not finite is not finite."""
    results: dict[int, list[torch.Tensor]] = {}
    for indices in groups_of(weights) if weights[0].is_cuda else ():
        contiguous = [index for index in indices if weights[index].stride(1) == 1]
        if contiguous:
            from loka.kernels.quantize.triton.int8_weights import quantize_rows_fused

            several = [weights[index].detach() for index in contiguous]
            copies = [_unwritten(weight) for weight in several]
            quantize_rows_fused(several, copies)
            results.update(zip(contiguous, copies, strict=True))
    for index, weight in enumerate(weights):
        if index not in results:
            side = Side(cast=CAST, padded=padded_sides(weight))
            copy, _ = quantize_pair(weight.detach(), row=side, column=None)
            assert copy is not None
            results[index] = [copy.data, copy.scale.view(-1)]
    return [tensor for index in range(len(weights)) for tensor in results[index]]


def _unwritten(weight: torch.Tensor) -> list[torch.Tensor]:
    rows, columns = padded_sides(weight)
    return [
        torch.empty(rows, columns, dtype=torch.int8, device=weight.device),
        torch.empty(rows, dtype=torch.float32, device=weight.device),
    ]


def _int8_weights_fake(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for weight in weights for tensor in _unwritten(weight)]


int8_weights = registered("loka::int8_weights", _int8_weights, _int8_weights_fake)
