"""2MNK of each of aten's matrix products: `PRODUCTS[name](out, *args)` yields (flops, operands).

Biases and additions are free. Names are those of the schema without its overload.
"""

import math

import torch

Tensor = torch.Tensor


def _mm(out, a, b, *_, **__):
    """[M, K] by [K, N], and with leading dimensions: every number of `a` meets N columns."""
    yield 2 * a.numel() * b.shape[-1], (a, b)


def _addmm(out, bias, a, b, *_, **__):
    yield 2 * a.numel() * b.shape[-1], (a, b)


def _mv(out, a, b):
    yield 2 * a.numel(), (a, b)


def _addmv(out, bias, a, b, **__):
    yield 2 * a.numel(), (a, b)


def _linear(out, x, weight, *_, **__):
    yield 2 * x.numel() * weight.shape[0], (x, weight)


def _linear_of_transposed(out, x, weight, *_, **__):
    yield 2 * x.numel() * weight.shape[1], (x, weight)


def _convolution(out, x, weight, *more, **kwargs):
    """Each number of the output (of the input, if transposed) meets `weight[0]`."""
    transposed = kwargs.get("transposed", more[4] if len(more) > 4 and isinstance(more[4], bool) else False)
    places = x if transposed else out
    yield 2 * places.numel() * math.prod(weight.shape[1:]), (x, weight)


def _attention(out, query, key, value, *_, **__):
    """[B, H, L, E]: scores, then the mixture of values. A mask or causality saves nothing."""
    scores = math.prod(query.shape[:-1]) * key.shape[-2]
    yield 2 * scores * query.shape[-1], (query, key)
    yield 2 * scores * value.shape[-1], (value,)


def _rnn_layer(out, x, w_ih, w_hh, *_, **__):
    tokens = x.numel() // w_ih.shape[1]
    yield 2 * tokens * w_ih.numel(), (w_ih,)
    yield 2 * tokens * w_hh.numel(), (w_hh,)


def _cudnn_rnn(out, x, weights, *_, **__):
    tokens = x.numel() // x.shape[-1]
    for weight in weights:
        if weight.dim() == 2:
            yield 2 * tokens * weight.numel(), (weight,)


def _lengths(x):
    return [len(row) for row in x.unbind()] if x.is_nested else [x.shape[1]] * x.shape[0]


def _of_tokens(lengths, width, weights):
    for weight in weights:
        yield 2 * sum(lengths) * weight.numel(), (weight,)
    yield 4 * width * sum(length**2 for length in lengths), ()


def _encoder_layer(out, x, width, heads, qkv, qkv_bias, proj, *more):
    """The fused layer of nn.TransformerEncoderLayer in evaluation; a nested tensor has no padding."""
    weights = [a for a in more if isinstance(a, torch.Tensor) and a.is_floating_point() and a.dim() == 2]
    yield from _of_tokens(_lengths(x), width, (qkv, proj, *weights[:2]))


def _native_attention(out, q, k, v, width, heads, qkv, _, proj, *__):
    """The fused self-attention of nn.MultiheadAttention in evaluation."""
    yield from _of_tokens(_lengths(q), width, (qkv, proj))


PRODUCTS = {
    "mm": _mm,
    "bmm": _mm,
    "_scaled_mm": _mm,
    "_int_mm": _mm,
    "addmm": _addmm,
    "addmm_": _addmm,
    "_addmm_activation": _addmm,
    "baddbmm": _addmm,
    "baddbmm_": _addmm,
    "addbmm": _addmm,
    "mv": _mv,
    "addmv": _addmv,
    "dot": _mv,
    "vdot": _mv,
    "linear": _linear,
    "_mkldnn_linear": _linear,
    "mkldnn_linear": _linear,
    "convolution": _convolution,
    "_convolution": _convolution,
    "convolution_overrideable": _convolution,
    "mkldnn_convolution": _convolution,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_cudnn_attention": _attention,
    "_scaled_dot_product_fused_attention_overrideable": _attention,
    "mkldnn_rnn_layer": _rnn_layer,
    "_cudnn_rnn": _cudnn_rnn,
    "_transformer_encoder_layer_fwd": _encoder_layer,
    "_native_multi_head_attention": _native_attention,
}
