"""The ops of NVIDIA GPUs: the CUDA C++ kernels if they are built, else Triton kernels, else the references."""

from __future__ import annotations

from dataclasses import replace

from ...kernels.compiled.library import LibraryMissing, find_cuda_library
from ...kernels.gpu.architectures import require_code
from ...kernels.ops import Ops
from ...kernels.ops.layer import Layer
from ...kernels.ops.linear import Linear
from ...kernels.ops.lora import Lora
from ...kernels.ops.moe import Moe
from ...kernels.ops.register import REFERENCES, KernelSet
from ...kernels.triton.problem import triton_problem
from . import MIN_CAPABILITY
from .driver import Driver, DriverFailed


def _with_library(ops: Ops) -> Ops:
    """`ops`, with the CUDA C++ kernels for all ops that have one. Raises LibraryMissing if they are not built, or not
    for this GPU."""
    _require_code_for_gpu()
    from ...kernels.compiled import embedding
    from ...kernels.compiled.ops import ACTIVATION, NORM, ROPE
    from ...kernels.cuda.attention import paged
    from ...kernels.cuda.layers import kv
    from ...kernels.cuda.lora import products as lora
    from ...kernels.cuda.moe import experts
    from ...kernels.cuda.products import linear
    from ...kernels.cuda.step import layer, stack

    return replace(
        ops,
        norm=NORM,
        activation=ACTIVATION,
        rope=ROPE,
        linear=Linear(
            dense=linear.dense,
            int8=linear.int8,
            int4=linear.int4,
            int4_wide=linear.int4_wide,
            fp8=linear.fp8,
            mxfp4=linear.mxfp4,
            embedding=embedding.embedding,
            pack_slices=linear.pack_slices,
        ),
        moe=Moe(route=experts.route, experts=experts.experts, pack_slices=experts.pack_slices),
        lora=Lora(add=lora.add, project=lora.project, embedding=lora.embedding),
        kv=replace(ops.kv, store=kv.store, copy_pages=kv.copy_pages, append=kv.append),
        attention=replace(ops.attention, paged=paged.paged_attention),
        layer=Layer(decoder=layer.decoder, decoders=stack.decoders, prepare_stack=stack.prepare_stack),
    )


def _require_code_for_gpu() -> None:
    """Raises LibraryMissing if the library has no code for the GPU of this machine."""
    library = find_cuda_library()
    try:
        driver = Driver()
        driver.first()
    except DriverFailed:  # no GPU: the ops are only listed
        return
    require_code(library, driver.capability())


def _kernels() -> tuple[tuple[KernelSet, ...], str]:
    """The sets of kernels of this machine; and the reason why the CUDA C++ kernels are missing, empty if they are
    built."""
    kernels = [REFERENCES]
    missing = ""
    if not triton_problem():
        from ...kernels.triton.ops import with_triton

        kernels.insert(0, KernelSet("triton", with_triton(Ops()), MIN_CAPABILITY))
    base = kernels[0].ops
    try:
        kernels.insert(0, KernelSet("cpp", _with_library(base), MIN_CAPABILITY, base))
    except LibraryMissing as error:
        missing = str(error)
    return tuple(kernels), missing


KERNELS, MISSING = _kernels()
OPS = KERNELS[0].ops
