"""nn.MultiheadAttention, whose projections are not modules that are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear, pad, scaled_dot_product_attention, softmax

from ingot.layers.base import Family, LayerAdapter, Tap, register
from ingot.layers.linear import LinearAdapter, batch_shared_features


class PackedProjection(LayerAdapter):
    """The projections of queries, keys and values in one weight: three matrices, one factor pair each."""

    def shape(self, module: nn.MultiheadAttention) -> tuple[tuple[int, ...], int, int]:
        return (3,), module.embed_dim, module.embed_dim

    def weight(self, module: nn.Module) -> nn.Parameter | None:
        return module._parameters.get("in_proj_weight")

    def bias(self, module: nn.Module) -> nn.Parameter | None:
        return module._parameters.get("in_proj_bias")

    def inputs(self, module: nn.MultiheadAttention, x: Tensor, g: Tensor) -> Tensor:
        used = g.shape[-1] // module.embed_dim  # a use may be of one, two or all three of the matrices
        return batch_shared_features(x).expand(used, -1, -1, -1)

    def output_gradients(self, module: nn.MultiheadAttention, x: Tensor, g: Tensor) -> Tensor:
        return batch_shared_features(g).unflatten(-1, (-1, module.embed_dim)).movedim(-2, 0)


class SeparateProjection(LinearAdapter):
    """One projection of a module whose keys or values have another dimension; all three share a bias."""

    def __init__(self, name: str) -> None:
        self._name = name

    def shape(self, module: nn.Module) -> tuple[tuple[int, ...], int, int]:
        d_o, d_i = getattr(module, self._name).shape
        return (), d_o, d_i

    def weight(self, module: nn.Module) -> nn.Parameter | None:
        return module._parameters.get(self._name)

    def bias(self, module: nn.Module) -> nn.Parameter | None:
        return None


_PACKED = PackedProjection()
_SEPARATE = {name: SeparateProjection(f"{name}_weight") for name in ("q_proj", "k_proj", "v_proj")}
_OUT = LinearAdapter()


@register("torch.nn.modules.activation.MultiheadAttention")
class AttentionFamily(Family):
    """Packed or separate input projections, and the output projection.

    torch computes all of it in one function, into which no hook can see. When statistics are wanted, the
    forward pass is therefore made once more, here, with a tap behind each projection.
    """

    def layers(self, module: nn.MultiheadAttention) -> dict[str, tuple[LayerAdapter, nn.Module]]:
        found: dict[str, tuple[LayerAdapter, nn.Module]] = {"out_proj": (_OUT, module.out_proj)}
        if module._qkv_same_embed_dim:
            return {"in_proj": (_PACKED, module)} | found
        return {name: (adapter, module) for name, adapter in _SEPARATE.items()} | found

    def draws_random_numbers(self, module: nn.MultiheadAttention) -> bool:
        return module.training and module.dropout > 0

    def capture(
        self,
        module: nn.MultiheadAttention,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        taps: Mapping[str, Tap],
    ) -> tuple[Tensor, Tensor | None]:
        return _attend(module, taps, *args, **kwargs)


def _attend(
    module: nn.MultiheadAttention,
    taps: Mapping[str, Tap],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The module's forward, with every projection led through its tap."""
    unbatched, heads = query.ndim == 2, module.num_heads
    same_qk, same_kv = query is key, key is value
    query, key, value = (_batch_first(module, x) for x in (query, key, value))
    q, k, v = _project(module, taps, query, key, value, same_qk and same_kv, same_kv)
    # A hint that the mask is causal, which counts only where nothing else is needed of the mask.
    causal = is_causal and key_padding_mask is None and not need_weights
    mask = None if causal else _additive_mask(q, k, heads, attn_mask, key_padding_mask)
    if module.bias_k is not None and module.bias_v is not None:
        k, v = (
            torch.cat((x, b.expand(len(x), -1, -1)), 1) for x, b in ((k, module.bias_k), (v, module.bias_v))
        )
    if module.add_zero_attn:
        k, v = (pad(x, (0, 0, 0, 1)) for x in (k, v))
    if mask is not None:
        mask = pad(mask, (0, k.shape[1] - mask.shape[-1]))
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))

    rate, weights = module.dropout if module.training else 0.0, None
    if need_weights:
        scores = q * q.shape[-1] ** -0.5 @ k.mT
        weights = softmax(scores if mask is None else scores + mask, dim=-1)
        weights = dropout(weights, rate) if rate else weights
        attended = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
        weights = weights.squeeze(0) if unbatched else weights
    else:
        attended = scaled_dot_product_attention(q, k, v, mask, rate, is_causal=causal)
    attended = attended.transpose(1, 2).flatten(-2)

    out = linear(attended, module.out_proj.weight, module.out_proj.bias)
    out = taps["out_proj"](out, attended) if "out_proj" in taps else out
    if unbatched:
        return out.squeeze(0), weights
    # As torch lays it out in memory: the mask of a dropout that follows is drawn in that order.
    out = out.transpose(0, 1).contiguous()
    return out.transpose(0, 1) if module.batch_first else out, weights


def _batch_first(module: nn.MultiheadAttention, x: Tensor) -> Tensor:
    if x.ndim == 2:
        return x.unsqueeze(0)
    return x if module.batch_first else x.transpose(0, 1)


def _project(
    module: nn.MultiheadAttention,
    taps: Mapping[str, Tap],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    all_same: bool,
    same_kv: bool,
) -> tuple[Tensor, ...]:
    """Queries, keys and values; inputs that are one tensor are projected in one product."""
    size, bias, packed = module.embed_dim, module.in_proj_bias, module._qkv_same_embed_dim
    uses = [(query, 0, 1), (key, 1, 1), (value, 2, 1)]  # input, first matrix, number of matrices
    if packed and all_same:
        uses = [(query, 0, 3)]
    elif packed and same_kv:
        uses = [(query, 0, 1), (key, 1, 2)]
    projected: list[Tensor] = []
    for x, start, count in uses:
        rows = slice(start * size, (start + count) * size)
        if packed:
            name, weight, first = "in_proj", module.in_proj_weight[rows], start
        else:
            name, first = list(_SEPARATE)[start], 0
            weight = getattr(module, f"{name}_weight")
        y = linear(x, weight, None if bias is None else bias[rows])
        y = taps[name](y, x, first) if name in taps else y
        projected += y.split(size, dim=-1)
    return tuple(projected)


def _additive_mask(
    q: Tensor, k: Tensor, heads: int, attn_mask: Tensor | None, key_padding_mask: Tensor | None
) -> Tensor | None:
    """Both masks as one to be added to the scores, ``[batch, heads or 1, queries or 1, keys]``."""
    parts = []
    if attn_mask is not None:
        mask = attn_mask if attn_mask.ndim == 2 else attn_mask.unflatten(0, (len(q), heads))
        parts.append(_as_float(mask, q.dtype))
    if key_padding_mask is not None:
        parts.append(_as_float(key_padding_mask, q.dtype).reshape(-1, 1, 1, k.shape[1]))
    return sum(parts[1:], parts[0]) if parts else None


def _as_float(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
