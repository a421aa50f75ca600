"""Test cases of the ops of kv.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..kv import Append, Rotation
from .case import Case, Make


def _store(tokens: int, cache: torch.dtype | None = None) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        pages = torch.randn(2, 6, 4, 2, 16, generator=generator).to(cache or dtype)
        written = torch.randn(2, tokens, 2, 16, generator=generator).to(dtype)
        slots = torch.randperm(24, generator=generator)[:tokens].to(torch.int64)
        return {
            "key": written[0],
            "value": written[1],
            "key_pages": pages[0],
            "value_pages": pages[1],
            "slots": slots,
        }

    return make


def _copies(
    sources: list[int], targets: list[int], parts: int = 3, dim: int = 16, cache: torch.dtype | None = None
) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        pages = torch.randn(parts, 6, 4, 2, dim, generator=generator).to(cache or dtype)
        return {"pages": pages, "sources": torch.tensor(sources).long(), "targets": torch.tensor(targets).long()}

    return make


def _append(
    tokens: int,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 32,
    half: int = 16,
    norms: bool = True,
    offset: float = 0.0,
    rotation: Rotation = "neox",
    cache: torch.dtype | None = None,
) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        angle = torch.rand(tokens, half, generator=generator) * 100.0
        weights = torch.randn(2, dim, generator=generator) * 0.1 + (1.0 - offset)
        query_norm, key_norm = weights.to(dtype) if norms else (None, None)
        pages = torch.randn(2, 12, 4, kv_heads, dim, generator=generator).to(cache or dtype)
        return {
            "qkv": torch.randn(tokens, heads + 2 * kv_heads, dim, generator=generator).to(dtype),
            "cos": angle.cos(),
            "sin": angle.sin(),
            "slots": torch.randperm(48, generator=generator)[:tokens].to(torch.int64),
            "target": Append(pages[0], pages[1], rotation, query_norm, key_norm, 1e-6, offset),
        }

    return make


def _append_latent(
    tokens: int,
    heads: int = 4,
    rank: int = 24,
    half: int = 4,
    rotation: Rotation = "interleaved",
    *,
    apart: bool = False,
) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        arguments = _append(tokens, heads - 1, 1, 2 * half + rank, half, False, rotation=rotation)(generator, dtype)
        some = {name: arguments[name] for name in ("cos", "sin", "slots")}
        keys = arguments["target"].key_pages
        pages = (keys[..., : 2 * half].contiguous(), keys[..., 2 * half :].contiguous()) if apart else (keys,)
        return {"heads": arguments["qkv"], "pages": pages, "rotation": rotation, **some}

    return make


_PAGES = ("key_pages", "value_pages")
TARGET = ("target.key_pages", "target.value_pages")  # arguments that append writes
_FP8 = torch.float8_e4m3fn
_COARSE = {torch.bfloat16: 7e-2}  # half the relative distance between neighbouring float8_e4m3fn values

CASES = [
    Case("kv.append", "plain", _append(9), mutates=TARGET),
    Case("kv.append", "one-token", _append(1, heads=16, kv_heads=8, dim=128, half=64), mutates=TARGET),
    Case("kv.append", "no-norms", _append(5, norms=False), mutates=TARGET),
    Case("kv.append", "gemma", _append(5, offset=1.0), mutates=TARGET),
    Case("kv.append", "partial", _append(5, half=5), mutates=TARGET),
    Case("kv.append", "interleaved", _append(7, rotation="interleaved"), mutates=TARGET),
    Case("kv.append", "odd-head", _append(3, heads=3, kv_heads=1, dim=37, half=11), mutates=TARGET),
    Case("kv.append", "no-tokens", _append(0), mutates=TARGET),
    Case("kv.append", "many", _append(33, heads=2, kv_heads=1), mutates=TARGET),
    Case("kv.append", "float8", _append(9, cache=_FP8), _COARSE, mutates=TARGET),
    Case(
        "kv.append",
        "float8-interleaved",
        _append(5, dim=128, half=64, rotation="interleaved", cache=_FP8),
        _COARSE,
        mutates=TARGET,
    ),
    *(
        Case("kv.append_latent", label, make, mutates=("pages",))
        for label, make in [
            ("one-token", _append_latent(1)),
            ("tokens", _append_latent(9)),
            ("no-tokens", _append_latent(0)),
            ("neox", _append_latent(5, rotation="neox")),
            ("one-head", _append_latent(5, heads=1)),
            ("odd-dims", _append_latent(7, heads=3, rank=37, half=5)),
            ("wide", _append_latent(17, heads=16, rank=512, half=32)),
            ("apart", _append_latent(5, apart=True)),
            ("apart-neox", _append_latent(5, rank=37, half=5, rotation="neox", apart=True)),
        ]
    ),
    Case("kv.store", "float8", _store(9, cache=_FP8), _COARSE, mutates=_PAGES),
    Case("kv.store", "plain", _store(9), mutates=_PAGES),
    Case("kv.store", "no-tokens", _store(0), mutates=_PAGES),
    Case("kv.copy_pages", "plain", _copies([1, 2], [4, 5]), mutates=("pages",)),
    Case("kv.copy_pages", "chain", _copies([1, 2, 3], [2, 3, 4]), mutates=("pages",)),
    Case("kv.copy_pages", "swap", _copies([1, 2], [2, 1]), mutates=("pages",)),
    Case("kv.copy_pages", "fan-out", _copies([3, 3], [1, 5]), mutates=("pages",)),
    Case("kv.copy_pages", "one-part", _copies([5, 1], [1, 0], parts=1), mutates=("pages",)),
    Case("kv.copy_pages", "many-parts", _copies([2, 4, 0], [0, 2, 3], parts=64), mutates=("pages",)),
    Case("kv.copy_pages", "odd-page", _copies([2, 4], [4, 3], dim=7), mutates=("pages",)),
    Case("kv.copy_pages", "float8", _copies([2, 4], [4, 3], cache=_FP8), mutates=("pages",)),
    Case("kv.copy_pages", "none", _copies([], []), mutates=("pages",)),
]
