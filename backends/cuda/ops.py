"""What NVIDIA GPUs compute with: CUDA C++ where it was built, Triton where it is installed, else references."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

from ...kernels.library import LibraryMissing
from ...kernels.ops import Ops
from ...kernels.ops.activation import Activation
from ...kernels.ops.attention import Attention
from ...kernels.ops.kv import KV, composed
from ...kernels.ops.norm import Norm
from ...kernels.ops.rope import Rope


def _with_triton(ops: Ops) -> Ops:
    from ...kernels.triton import attention

    return replace(ops, attention=Attention(paged=attention.paged_attention))


def _with_library(ops: Ops) -> Ops:
    """Raises LibraryMissing where the CUDA C++ kernels were not built."""
    from ...kernels import cuda  # noqa: F401  loads them
    from ...kernels.cpu import activation, kv, norm, rope

    norms = Norm(rms=norm.rms_norm, add_rms=norm.add_rms_norm, layer=norm.layer_norm)
    ropes = Rope(neox=rope.rope, interleaved=rope.interleaved_rope)
    return replace(
        ops,
        norm=norms,
        activation=Activation(
            silu_and_mul=activation.silu_and_mul,
            gelu_and_mul=activation.gelu_and_mul,
            gelu_tanh_and_mul=activation.gelu_tanh_and_mul,
        ),
        rope=ropes,
        kv=KV(store=kv.store, copy_pages=kv.copy_pages, append=composed(norms, ropes, kv.store)),
    )


def _best() -> tuple[Ops, str]:
    """(the ops, why the library is not among them)"""
    ops = Ops()
    if find_spec("triton") is not None:
        ops = _with_triton(ops)
    try:
        return _with_library(ops), ""
    except LibraryMissing as error:
        return ops, str(error)


OPS, MISSING = _best()
