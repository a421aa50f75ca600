"""The ops of the CPU, computed by the C++ kernels. The import raises LibraryMissing if the kernels are not built."""

from __future__ import annotations

from ...kernels.compiled import embedding
from ...kernels.compiled.ops import ACTIVATION, NORM, ROPE
from ...kernels.cpu.attention import paged
from ...kernels.cpu.layers import kv
from ...kernels.cpu.lora import products as lora
from ...kernels.cpu.moe import experts
from ...kernels.cpu.products import linear
from ...kernels.cpu.sampling import draw
from ...kernels.cpu.state import conv, gated_norm, scan
from ...kernels.cpu.step import layer, stack
from ...kernels.ops import Ops
from ...kernels.ops.attention import Attention
from ...kernels.ops.kv import KV
from ...kernels.ops.layer import Layer
from ...kernels.ops.linear import Linear
from ...kernels.ops.lora import Lora
from ...kernels.ops.moe import Moe
from ...kernels.ops.sampling import Sampling
from ...kernels.ops.state import State

OPS = Ops(
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
    lora=Lora(add=lora.add, embedding=lora.embedding),
    kv=KV(store=kv.store, copy_pages=kv.copy_pages, append=kv.append),
    attention=Attention(paged=paged.paged_attention, latent=paged.latent_attention),
    # No kernels for biases and penalties: they change only a few tokens of a row.
    sampling=Sampling(mask=draw.mask, greedy=draw.greedy, draw=draw.draw, logprobs=draw.logprobs),
    state=State(
        conv=conv.conv,
        short_conv=conv.short_conv,
        gated_delta=scan.gated_delta,
        ssd=scan.ssd,
        gated_norm=gated_norm.gated_norm,
    ),
    layer=Layer(
        decoder=layer.decoder, prepare=layer.prepare, decoders=stack.decoders, prepare_stack=stack.prepare_stack
    ),
)
