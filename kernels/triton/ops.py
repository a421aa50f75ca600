"""The Triton kernels as ops, for every device whose torch has Triton: CUDA, HIP and XPU."""

from __future__ import annotations

from dataclasses import replace

from ..ops import Ops
from ..ops.activation import Activation
from ..ops.attention import Attention
from ..ops.lora import Lora
from ..ops.moe import Moe
from ..ops.norm import Norm
from ..ops.rope import Rope
from ..ops.sampling import Sampling
from ..ops.state import State
from . import activation, attention, draw, kv, linear, lora, moe, norm, rope, sampling, state


def with_triton(ops: Ops) -> Ops:
    """These ops with a Triton kernel for each op that has one."""
    return replace(
        ops,
        norm=Norm(rms=norm.rms_norm, add_rms=norm.add_rms_norm),
        activation=Activation(
            silu_and_mul=activation.silu_and_mul,
            gelu_and_mul=activation.gelu_and_mul,
            gelu_tanh_and_mul=activation.gelu_tanh_and_mul,
        ),
        rope=Rope(neox=rope.rope, interleaved=rope.interleaved_rope),
        linear=replace(
            ops.linear,
            dense=linear.dense,
            int8=linear.int8,
            int4=linear.int4,
            int4_wide=linear.int4_wide,
            fp8=linear.fp8,
            mxfp4=linear.mxfp4,
            pack_slices=linear.pack_slices,
        ),
        moe=Moe(route=moe.route, experts=moe.experts, pack_slices=moe.pack_slices),
        lora=Lora(add=lora.add, embedding=lora.embedding),
        kv=replace(ops.kv, append=kv.append, append_latent=kv.append_latent),
        attention=Attention(paged=attention.paged_attention, latent=attention.latent_attention),
        sampling=Sampling(
            carry=sampling.carry,
            bias=sampling.bias,
            penalise=sampling.penalise,
            mask=sampling.mask,
            greedy=sampling.greedy,
            draw=draw.draw,
            logprobs=sampling.logprobs,
        ),
        state=State(
            conv=state.conv,
            short_conv=state.short_conv,
            gated_delta=state.gated_delta,
            ssd=state.ssd,
            gated_norm=state.gated_norm,
        ),
    )
