"""The functions of MLX and mlx-lm that compute the ops of kernels/ops on the backend mlx, for `localllm doctor --ops`.

MLX has no Ops: mlx-lm's models call these functions. Products with quantised weights do not round activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# Op -> function of mlx.core (mx), mlx.nn (nn), mlx_lm.models (mlx_lm) or this package. An op
# that is missing has no counterpart: MLX fuses no layers and appends to no pages.
OPS: Mapping[str, str] = MappingProxyType(
    {
        "norm.rms": "mx.fast.rms_norm",
        "norm.add_rms": "mx.fast.rms_norm",
        "norm.layer": "mx.fast.layer_norm",
        "activation.silu_and_mul": "mlx_lm.activations.swiglu",
        "activation.gelu_and_mul": "nn.gelu",
        "activation.gelu_tanh_and_mul": "nn.gelu_approx",
        "activation.clamped_swiglu_and_mul": "mlx_lm.gpt_oss.SwigluOAI",
        "rope.neox": "mx.fast.rope",
        "rope.interleaved": "mx.fast.rope",
        "linear.dense": "mx.addmm",
        "linear.int8": "mx.quantized_matmul",
        "linear.int4_wide": "mx.quantized_matmul",
        "linear.mxfp4": "mx.quantized_matmul",
        "linear.embedding": "nn.Embedding",
        "linear.pack_slices": "mx.quantize",
        "moe.route": "mx.argpartition",
        "moe.experts": "mx.gather_qmm",
        "moe.pack_slices": "mx.quantize",
        "lora.add": "mx.gather_mm",
        "lora.embedding": "mx.gather_mm",
        "attention.paged": "mx.fast.scaled_dot_product_attention",
        "attention.latent": "mx.fast.scaled_dot_product_attention",
        **dict.fromkeys(("sampling.bias", "sampling.penalise", "sampling.mask", "sampling.greedy"), "sampler.sample"),
        **dict.fromkeys(("sampling.draw", "sampling.logprobs"), "sampler.sample"),
    }
)
