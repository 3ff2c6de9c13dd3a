"""nn.MultiheadAttention with its projections as sites.

    q, k, v = input projections,   o = softmax(q k^T / sqrt(d) + mask) v,   y = o W_o^T + b_o

F.multi_head_attention_forward multiplies by raw parameters and their slices; torch.compile cannot trace it
under a function mode, and the module's inference path hands its weights to a fused kernel. So here the
arithmetic between the projections is written out, as torch defines it.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from loka.nn.leaves import with_bias
from loka.nn.site import Site, SiteForward

OUT = "out_proj.weight"
SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def packed_keys(width: int) -> dict[str, tuple[str, ...]]:
    """By how the inputs are shared, the keys of the projections: views that torch takes of the weight."""
    whole = "in_proj_weight"
    pair = f"{whole}.split([{width}, {2 * width}])"
    return {
        "self": (whole,),
        "kv": (f"{pair}[0]", f"{pair}[1]"),
        "apart": tuple(f"{whole}.chunk(3)[{place}]" for place in range(3)),
    }


def projection_keys(module: nn.MultiheadAttention) -> set[str]:
    """All that its projections may multiply by."""
    if not module._qkv_same_embed_dim:
        return {OUT, *SEPARATE}
    return {OUT, *(key for keys in packed_keys(module.embed_dim).values() for key in keys)}


class AttentionForward(SiteForward):
    def __init__(self, module: nn.Module, sites: dict[str, Site]) -> None:
        """`sites`: by the key of the view of a weight, in this module."""
        super().__init__(module, list(sites.values()))
        self.by_key = sites

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        module = self.module
        assert isinstance(module, nn.MultiheadAttention)
        if query.is_nested:
            return self._nested(query, key, value, need_weights)
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        batched = query.dim() == 3
        shared = "self" if query is key and key is value else "kv" if key is value else "apart"
        q, k, v = (_by_position(x, batched, module.batch_first) for x in (query, key, value))
        length, batch, width = q.shape
        # torch then goes by the hint, and does not look at the mask: neither a bias as a key nor a zero is seen.
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else _merged_mask(module, key_padding_mask, attn_mask, q, batched)
        q, k, v = self._projected(q, k, v, shared)
        k, v, mask = _extended(module, k, v, mask)
        heads, head = module.num_heads, module.head_dim
        q, k, v = (x.reshape(x.shape[0], batch, heads, head).permute(1, 2, 0, 3) for x in (q, k, v))
        dropout = module.dropout if module.training else 0.0
        if need_weights:
            scores = (q * math.sqrt(1.0 / head)) @ k.transpose(-2, -1)
            weights = (scores if mask is None else scores + mask).softmax(dim=-1)
            weights = F.dropout(weights, p=dropout) if dropout else weights
            o = weights @ v
        else:
            weights = None
            o = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
        o = o.permute(2, 0, 1, 3).reshape(length, batch, width)
        y = _multiply(self.by_key.get(OUT), o, module.out_proj.weight, module.out_proj.bias)
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not batched:
            return y.squeeze(1), None if weights is None else weights.squeeze(0)
        return (y.transpose(0, 1) if module.batch_first else y), weights

    def _projected(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shared: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        module, width = self.module, q.shape[-1]
        assert isinstance(module, nn.MultiheadAttention)
        bias = module.in_proj_bias
        biases: tuple[torch.Tensor | None, ...] = (None,) * 3 if bias is None else bias.chunk(3)
        if not module._qkv_same_embed_dim:
            weights: tuple[torch.Tensor, ...] = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
            return _three([self.by_key.get(key) for key in SEPARATE], (q, k, v), weights, biases)
        weight, keys = module.in_proj_weight, packed_keys(width)
        if self._runs_as(shared, keys) == "self":
            q, k, v = _multiply(self.by_key.get(keys["self"][0]), q, weight, bias).chunk(3, dim=-1)
            return q, k, v
        if self._runs_as(shared, keys) == "kv":
            halves = weight.split([width, 2 * width])
            of_q, of_kv = (None, None) if bias is None else bias.split([width, 2 * width])
            for_q, for_kv = (self.by_key.get(key) for key in keys["kv"])
            q = _multiply(for_q, q, halves[0], of_q)
            k, v = _multiply(for_kv, k, halves[1], of_kv).chunk(2, dim=-1)
            return q, k, v
        sites = [self._site_of_part(part, keys) for part in range(3)]
        return _three(sites, (q, k, v), weight.chunk(3), biases)

    def _runs_as(self, shared: str, keys: dict[str, tuple[str, ...]]) -> str:
        """How the inputs are shared, or "apart" where only other views of the weight are planned.

        FSDP2 and reentrant checkpoints hand one tensor over as three, so a module that was probed without
        them is called otherwise within them.
        """
        planned = {how for how, names in keys.items() if any(name in self.by_key for name in names)}
        return shared if shared in planned or not planned else "apart"

    def _site_of_part(self, part: int, keys: dict[str, tuple[str, ...]]) -> Site | None:
        names = keys["apart"][part], keys["kv"][min(part, 1)], keys["self"][0]
        return next((self.by_key[name] for name in names if name in self.by_key), None)

    def _nested(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, need_weights: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sequences of nn.TransformerEncoder's inference: padded, masked, and packed again."""
        if not (query is key and key is value) or need_weights:
            raise ValueError("nested tensors are taken for self-attention without need_weights only; pad them instead")
        lengths = [part.shape[0] for part in query.unbind()]
        padded = query.to_padded_tensor(0.0)
        positions = torch.arange(padded.shape[1], device=padded.device)
        ends = torch.tensor(lengths, device=padded.device)
        y, _ = self(padded, padded, padded, positions >= ends[:, None], need_weights=False)
        parts = [row[:length] for row, length in zip(y, lengths, strict=True)]
        return torch.nested.as_nested_tensor(parts, layout=query.layout), None


def _multiply(site: Site | None, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if site is None:
        return F.linear(x, weight, bias)
    return with_bias(site(x, weight), bias)


def _three(
    sites: Sequence[Site | None],
    inputs: tuple[torch.Tensor, ...],
    weights: tuple[torch.Tensor, ...],
    biases: tuple[torch.Tensor | None, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = map(_multiply, sites, inputs, weights, biases)
    return q, k, v


def _by_position(x: torch.Tensor, batched: bool, batch_first: bool) -> torch.Tensor:
    """[L, B, E]."""
    if not batched:
        return x.unsqueeze(1)
    return x.transpose(0, 1) if batch_first else x


def _merged_mask(
    module: nn.MultiheadAttention,
    padding: torch.Tensor | None,
    mask: torch.Tensor | None,
    q: torch.Tensor,
    batched: bool,
) -> torch.Tensor | None:
    """Both masks as one that is added to the scores, broadcast over [B, heads, L, S]."""
    batch = q.shape[1]
    if mask is not None:
        mask = _added(mask, q.dtype)
        mask = mask.view(batch, module.num_heads, *mask.shape[1:]) if mask.dim() == 3 else mask
    if padding is not None:
        padding = _added(padding if batched else padding.unsqueeze(0), q.dtype)[:, None, None, :]
        mask = padding if mask is None else mask + padding
    return mask


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
    return mask


def _extended(
    module: nn.MultiheadAttention, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Keys and values [S, B, E] with bias_k, bias_v and a zero behind them, where the module has those."""
    batch, added = k.shape[1], 0
    if module.bias_k is not None and module.bias_v is not None:
        k = torch.cat([k, module.bias_k.expand(-1, batch, -1).to(k.dtype)])
        v = torch.cat([v, module.bias_v.expand(-1, batch, -1).to(v.dtype)])
        added += 1
    if module.add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 0, 0, 1)), F.pad(v, (0, 0, 0, 0, 0, 1))
        added += 1
    return k, v, mask if mask is None or not added else F.pad(mask, (0, added))
