"""Norms, gated activations and rotations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .rules import FLOATS, Call, Changes, Op, contiguous, dtype_of, rule


def _norm(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    dims = tuple(range(x.dim() - gamma.dim(), x.dim()))
    inverse = torch.rsqrt(x.float().square().mean(dims, keepdim=True) + epsilon)
    return (x.float() * inverse * gamma.float()).to(x.dtype), inverse


class RmsNorm(Op):
    names = ("npu::npu_rms_norm",)

    def example(self) -> Changes:
        return {"input": torch.randn(3, 32), "gamma": torch.randn(32), "epsilon": 1e-6}

    def check(self, c: Call) -> None:
        rule(dtype_of(c.input, *FLOATS), "npu_rms_norm: the dtype is float16, bfloat16 or float32")
        rule(c.gamma.dtype == c.input.dtype, "npu_rms_norm: gamma has the dtype of the input")
        rule(
            c.input.shape[-c.gamma.dim() :] == c.gamma.shape, "npu_rms_norm: gamma has the last dimensions of the input"
        )

    def compute(self, c: Call) -> Any:
        return _norm(c.input, c.gamma, c.epsilon)

    def wrong(self, c: Call) -> Iterator[tuple[str, Changes]]:
        yield "float16, bfloat16 or float32", {"input": c.input.double(), "gamma": c.gamma.double()}
        yield "dtype of the input", {"gamma": c.gamma.half()}
        yield "last dimensions", {"gamma": c.gamma[:16]}


class GemmaRmsNorm(Op):
    names = ("npu::npu_gemma_rms_norm",)

    def example(self) -> Changes:
        return {"input": torch.randn(3, 32), "gamma": torch.randn(32), "epsilon": 1e-6}

    def check(self, c: Call) -> None:
        rule(dtype_of(c.input, *FLOATS), "npu_gemma_rms_norm: the dtype is float16, bfloat16 or float32")
        rule(c.gamma.dtype == c.input.dtype, "npu_gemma_rms_norm: gamma has the dtype of the input")
        rule(contiguous(c.input, c.gamma), "npu_gemma_rms_norm: tensors are contiguous")

    def compute(self, c: Call) -> Any:
        return _norm(c.input, c.gamma.float() + 1.0, c.epsilon)

    def wrong(self, c: Call) -> Iterator[tuple[str, Changes]]:
        yield "float16, bfloat16 or float32", {"input": c.input.double(), "gamma": c.gamma.double()}
        yield "dtype of the input", {"gamma": c.gamma.half()}
        yield "contiguous", {"input": torch.randn(32, 3).T}


class AddRmsNorm(Op):
    """No documentation in the wheel: the rules are those of npu_rms_norm."""

    names = ("npu::npu_add_rms_norm",)

    def example(self) -> Changes:
        return {"x1": torch.randn(3, 32), "x2": torch.randn(3, 32), "gamma": torch.randn(32), "epsilon": 1e-6}

    def check(self, c: Call) -> None:
        rule(dtype_of(c.x1, *FLOATS), "npu_add_rms_norm: the dtype is float16, bfloat16 or float32")
        rule(c.x1.dtype == c.x2.dtype == c.gamma.dtype, "npu_add_rms_norm: x1, x2 and gamma have one dtype")
        rule(c.x1.shape == c.x2.shape, "npu_add_rms_norm: x1 and x2 have one shape")

    def compute(self, c: Call) -> Any:
        total = c.x1 + c.x2
        output, inverse = _norm(total, c.gamma, c.epsilon)
        return output, inverse, total

    def wrong(self, c: Call) -> Iterator[tuple[str, Changes]]:
        yield "float16, bfloat16 or float32", {name: vars(c)[name].double() for name in ("x1", "x2", "gamma")}
        yield "one dtype", {"x2": c.x2.half()}
        yield "one shape", {"x2": c.x2[:1]}


class Swiglu(Op):
    names = ("npu::npu_swiglu",)

    def example(self) -> Changes:
        return {"input": torch.randn(3, 32), "dim": -1}

    def check(self, c: Call) -> None:
        rule(dtype_of(c.input, *FLOATS), "npu_swiglu: the dtype is float32, float16 or bfloat16")
        rule(1 <= c.input.dim() <= 8, "npu_swiglu: the input has 1 to 8 dimensions")
        rule(c.input.shape[c.dim] % 2 == 0, "npu_swiglu: dim is split into two halves")

    def compute(self, c: Call) -> Any:
        gate, up = c.input.chunk(2, c.dim)
        return (F.silu(gate.float()) * up.float()).to(gate.dtype)

    def wrong(self, c: Call) -> Iterator[tuple[str, Changes]]:
        yield "float32, float16 or bfloat16", {"input": c.input.double()}
        yield "1 to 8 dimensions", {"input": c.input.view(3, 1, 1, 1, 1, 1, 1, 1, 32)}
        yield "two halves", {"input": c.input[:, :31]}


class Geglu(Op):
    names = ("npu::npu_geglu",)

    def example(self) -> Changes:
        return {"input": torch.randn(3, 32), "dim": -1, "approximate": 1, "activate_left": True}

    def check(self, c: Call) -> None:
        rule(dtype_of(c.input, *FLOATS), "npu_geglu: the dtype is float32, float16 or bfloat16")
        rule(c.approximate in (0, 1), "npu_geglu: approximate is 0 (none) or 1 (tanh)")
        rule(-c.input.dim() <= c.dim < c.input.dim(), "npu_geglu: dim is a dimension of the input")
        rule(c.input.shape[c.dim] % 2 == 0, "npu_geglu: dim is split into two halves")

    def compute(self, c: Call) -> Any:
        left, right = c.input.float().chunk(2, c.dim)
        gate, up = (left, right) if c.activate_left else (right, left)
        activated = F.gelu(gate, approximate="tanh" if c.approximate else "none")
        return (activated * up).to(c.input.dtype), activated.to(c.input.dtype)

    def wrong(self, c: Call) -> Iterator[tuple[str, Changes]]:
        yield "float32, float16 or bfloat16", {"input": c.input.double()}
        yield "approximate is 0", {"approximate": 2}
        yield "a dimension of the input", {"dim": 2}
        yield "two halves", {"input": c.input[:, :31]}


class FastGelu(Op):
    names = ("npu::npu_fast_gelu",)

    def example(self) -> Changes:
        return {"input": torch.randn(3, 32)}

    def check(self, c: Call) -> None:
        rule(dtype_of(c.input, *FLOATS), "npu_fast_gelu: the dtype is float16, float32 or bfloat16")
        rule(c.input.dim() <= 8, "npu_fast_gelu: the input has at most 8 dimensions")

    def compute(self, c: Call) -> Any:
        x = c.input.float()
        return (x * torch.sigmoid(1.702 * x)).to(c.input.dtype)

    def wrong(self, c: Call) -> Iterator[tuple[str, Changes]]:
        yield "float16, float32 or bfloat16", {"input": c.input.double()}
        yield "at most 8 dimensions", {"input": c.input.view(3, 1, 1, 1, 1, 1, 1, 1, 32)}


def _turned(x: Tensor, mode: str) -> Tensor:
    """(-b, a) for each pair (a, b): halves, or neighbours."""
    if mode == "half":
        left, right = x.chunk(2, -1)
        return torch.cat((-right, left), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


class RotaryMul(Op):
    names = ("npu::npu_rotary_mul",)

    def example(self) -> Changes:
        table = torch.randn(1, 4, 1, 64)
        return {"input": torch.randn(1, 4, 2, 64), "r1": table, "r2": table, "rotary_mode": "half"}

    def check(self, c: Call) -> None:
        rule(c.rotary_mode in ("half", "interleave"), "npu_rotary_mul: rotary_mode is half or interleave")
        rule(c.rotate is None, "npu_rotary_mul: the reference has no matrix `rotate`")
        rule(c.input.dim() == c.r1.dim() == c.r2.dim() == 4, "npu_rotary_mul: input, r1 and r2 have 4 dimensions")
        rule(dtype_of(c.input, *FLOATS), "npu_rotary_mul: the dtype is float16, bfloat16 or float32")
        rule(
            c.r1.shape == c.r2.shape and c.r1.dtype == c.r2.dtype, "npu_rotary_mul: r1 and r2 have one shape and dtype"
        )
        rule(c.input.shape[-1] == c.r1.shape[-1], "npu_rotary_mul: r1 has the last dimension of the input")
        rule(c.input.shape[-1] % 2 == 0, "npu_rotary_mul: the last dimension is even")
        shapes = zip(c.input.shape[:-1], c.r1.shape[:-1], strict=True)
        rule(all(table in (1, size) for size, table in shapes), "npu_rotary_mul: r1 broadcasts to the input")
        rule(c.input.shape[-1] < 896, "npu_rotary_mul: the last dimension is less than 896")
        # The layout is BNSD, BSND or SBND: S is the dimension that r1 has too.
        others = [size for size, table in zip(c.input.shape[:-1], c.r1.shape[:-1], strict=True) if table == 1]
        rule(all(size < 1000 for size in others), "npu_rotary_mul: batch and heads are less than 1000")
        is_small = c.rotary_mode == "half" or (math.prod(others) < 1000 and len(others) >= 2)
        rule(is_small, "npu_rotary_mul: interleave has r1 of one sequence, and batch * heads less than 1000")

    def compute(self, c: Call) -> Any:
        x = c.input.float()
        return (c.r1.float() * x + c.r2.float() * _turned(x, c.rotary_mode)).to(c.input.dtype)

    def wrong(self, c: Call) -> Iterator[tuple[str, Changes]]:
        yield "half or interleave", {"rotary_mode": "neox"}
        yield "no matrix", {"rotate": torch.eye(64)}
        yield "4 dimensions", {"input": c.input[0]}
        yield "float16, bfloat16 or float32", {"input": c.input.double()}
        yield "one shape and dtype", {"r2": c.r2.half()}
        yield "last dimension of the input", {"input": c.input[..., :32]}
        yield "is even", {"input": c.input[..., :63], "r1": c.r1[..., :63], "r2": c.r2[..., :63]}
        yield "broadcasts", {"r1": c.r1[:, :3], "r2": c.r2[:, :3]}
        wide = torch.zeros(1, 4, 1, 896)
        yield "less than 896", {"input": wide, "r1": wide, "r2": wide}
        yield "heads are less than 1000", {"input": torch.zeros(1, 4, 1000, 64)}
        yield "interleave has", {"input": torch.zeros(40, 4, 40, 64), "rotary_mode": "interleave"}


class Mrope(Op):
    names = ("npu::npu_mrope",)

    def example(self) -> Changes:
        return {
            "positions": torch.arange(4),
            "query": torch.randn(4, 128),
            "key": torch.randn(4, 64),
            "cos_sin_cache": torch.randn(16, 32),
            "head_size": 64,
            "mrope_section": [0, 0, 0],
            "rotary_mode": "half",
        }

    def check(self, c: Call) -> None:
        tables = (c.query, c.key, c.cos_sin_cache)
        rotary = c.cos_sin_cache.shape[-1]
        section = c.mrope_section or [0, 0, 0]
        rule(c.positions.dim() in (1, 2), "npu_mrope: positions have 1 or 2 dimensions")
        rule(dtype_of(c.positions, torch.int32, torch.int64), "npu_mrope: positions are int32 or int64")
        rule(all(table.dim() == 2 for table in tables), "npu_mrope: query, key and cos_sin_cache have 2 dimensions")
        rule(all(dtype_of(table, *FLOATS) for table in tables), "npu_mrope: dtypes are bfloat16, float16 or float32")
        unit = 16 if c.cos_sin_cache.dtype == torch.float32 else 32
        rule(rotary % unit == 0, "npu_mrope: the rotary dimension is a multiple of 32, or of 16 for float32")
        rule(rotary <= c.head_size, "npu_mrope: the rotary dimension is at most the size of a head")
        is_even = all(table.shape[1] % c.head_size == 0 for table in (c.query, c.key))
        rule(is_even, "npu_mrope: query and key have whole heads")
        rule(c.rotary_mode in ("half", "interleave"), "npu_mrope: rotary_mode is half or interleave")
        is_mrope = c.positions.dim() == 2
        rule(
            not is_mrope or sum(section) == rotary // 2, "npu_mrope: mrope_section adds up to half the rotary dimension"
        )
        rule(is_mrope == any(section), "npu_mrope: 1-dimensional positions have no mrope_section")

    def compute(self, c: Call) -> Any:
        cos, sin = (self._table(table, c) for table in c.cos_sin_cache.float()[c.positions.long()].chunk(2, -1))
        return tuple(self._rotate(x, cos, sin, c) for x in (c.query, c.key))

    def _table(self, table: Tensor, c: Call) -> Tensor:
        """[tokens, 1, rotary] from [tokens, half], or from [3, tokens, half] with a part of each."""
        if c.positions.dim() == 2:
            table = torch.cat([part[i] for i, part in enumerate(table.split(c.mrope_section, -1))], -1)
        both = torch.cat((table, table), -1) if c.rotary_mode == "half" else table.repeat_interleave(2, -1)
        return both[:, None]

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor, c: Call) -> Tensor:
        heads = x.float().unflatten(1, (-1, c.head_size))
        head, rest = heads.split((cos.shape[-1], c.head_size - cos.shape[-1]), -1)
        return torch.cat((head * cos + _turned(head, c.rotary_mode) * sin, rest), -1).flatten(1).to(x.dtype)

    def wrong(self, c: Call) -> Iterator[tuple[str, Changes]]:
        yield "1 or 2 dimensions", {"positions": c.positions[None, None]}
        yield "int32 or int64", {"positions": c.positions.short()}
        yield "query, key and cos_sin_cache", {"query": c.query.view(4, 2, 64)}
        yield "bfloat16, float16 or float32", {"query": c.query.double()}
        yield "multiple of 32", {"cos_sin_cache": c.cos_sin_cache[:, :24]}
        yield "at most the size of a head", {"cos_sin_cache": torch.randn(16, 128)}
        yield "whole heads", {"key": c.key[:, :48]}
        yield "half or interleave", {"rotary_mode": "neox"}
        yield "adds up", {"positions": c.positions.expand(3, 4), "mrope_section": [8, 4, 0]}
        yield "no mrope_section", {"mrope_section": [8, 4, 4]}


OPS = (RmsNorm(), GemmaRmsNorm(), AddRmsNorm(), Swiglu(), Geglu(), FastGelu(), RotaryMul(), Mrope())
