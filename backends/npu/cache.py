"""Writes to the paged KV cache of the NPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.ops import kv as reference
from ...kernels.ops.kv import KV, Append, Rotation, composed, store_scales
from .elementwise import NORM, ROPE


def store(key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor) -> None:
    """See kernels.ops.kv.store. Only padding tokens have the same slots, in page 0, which nothing reads."""
    torch.ops.npu.npu_scatter_pa_kv_cache(
        key.to(key_pages.dtype).contiguous(),
        value.to(value_pages.dtype).contiguous(),
        key_pages,
        value_pages,
        slots,
        cache_mode="Norm",
    )


def store_int8(key: Tensor, value: Tensor, target: Append, slots: Tensor) -> None:
    """See kernels.ops.kv.store_int8."""
    (keys, key_scales), (values, value_scales) = (torch.ops.npu.npu_dynamic_quant(x.contiguous()) for x in (key, value))
    store(keys, values, target.key_pages, target.value_pages, slots)
    store_scales(torch.stack((key_scales, value_scales), dim=2), target, slots)


def append_latent(
    heads: Tensor, cos: Tensor, sin: Tensor, rotation: Rotation, slots: Tensor, pages: tuple[Tensor, ...]
) -> Tensor:
    """See kernels.ops.kv.append_latent. One op writes the rotated keys and the latents."""
    if len(pages) == 1:
        return reference.append_latent(heads, cos, sin, rotation, slots, pages)
    query, key = heads.split((heads.shape[1] - 1, 1), dim=1)
    rotate = ROPE.neox if rotation == "neox" else ROPE.interleaved
    query, key = rotate(query, key, cos, sin)
    rotated_pages, latent_pages = pages
    rotated, latent = key.split((rotated_pages.shape[3], latent_pages.shape[3]), dim=2)
    store(rotated, latent, rotated_pages, latent_pages, slots)
    return query


WRITES = KV(store=store, append=composed(NORM, ROPE, store, store_int8), append_latent=append_latent)
