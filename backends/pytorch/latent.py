"""Builds layers with multi-head latent attention (kernels/ops/mla.py) from a model's files."""

from __future__ import annotations

from ...engine.files.latent_config import LatentConfig
from ...engine.files.model_config import ModelConfig
from ...kernels.ops.layer import DecoderLayer
from ...kernels.ops.mla import LatentInputs, LatentOutputs
from ...kernels.ops.mlp import Mlp
from .experts import gated_mlp
from .weights import Weights

NORM_EPS = 1e-6  # epsilon of the norms inside attention; transformers does not use rms_norm_eps there


class LatentLayer:
    """A layer with latent attention over a latent cache, and an MLP."""

    def __init__(self, weights: Weights, config: ModelConfig, index: int, mlp: Mlp | None) -> None:
        """`mlp`: None for a dense MLP. Raises ModelRefused for missing or wrong tensors."""
        latent = config.latent
        assert latent is not None
        name = f"model.layers.{index}"
        hidden = config.hidden_size
        inputs, outputs = _projections(weights, config, latent, f"{name}.self_attn")
        self.kind = config.layer_kinds[index]
        self.prepared = weights.prepare(
            DecoderLayer(
                before_attention=weights.take(f"{name}.input_layernorm.weight", (hidden,)),
                before_mlp=weights.take(f"{name}.post_attention_layernorm.weight", (hidden,)),
                after_attention=None,
                after_mlp=None,
                query_norm=None,
                key_norm=None,
                qkv=inputs,
                out=outputs,
                mlp=mlp or gated_mlp(weights, config, f"{name}.mlp", config.intermediate_size),
                rotation="interleaved" if latent.interleaved else "neox",
                dim=latent.cache_dim,
                eps=config.norm_eps,
                offset=0.0,
                scale=config.attention_scale,
                cache_index=index,
                value_start=latent.rotary_dim,
            )
        )


def _projections(
    weights: Weights, config: ModelConfig, latent: LatentConfig, name: str
) -> tuple[LatentInputs, LatentOutputs]:
    """The projections before and after the attention `name`.

    The projection of the latent to keys and values (kv_b_proj) is absorbed. It is never quantised: each head has two
    products with it, and one of them sums over its outputs.
    """
    heads = config.num_heads
    hidden = config.hidden_size
    query_dim = heads * latent.head_dim
    first = "q_a_proj" if latent.query_rank else "q_proj"
    query_norm = None
    queries = None
    if latent.query_rank:
        query_norm = weights.take(f"{name}.q_a_layernorm.weight", (latent.query_rank,))
        queries = weights.linear([f"{name}.q_b_proj"], [query_dim], latent.query_rank)
    key_values = weights.dequantised(
        f"{name}.kv_b_proj", heads * (latent.plain_dim + latent.value_dim), latent.rank
    ).unflatten(0, (heads, -1))
    inputs = LatentInputs(
        down=weights.linear(
            [f"{name}.{first}", f"{name}.kv_a_proj_with_mqa"],
            [latent.query_rank or query_dim, latent.cache_dim],
            hidden,
            config.qkv_bias,
        ),
        query_norm=query_norm,
        queries=queries,
        latent_norm=weights.take(f"{name}.kv_a_layernorm.weight", (latent.rank,)),
        keys=key_values[:, : latent.plain_dim],
        rotary=latent.rotary_dim,
        eps=NORM_EPS,
    )
    outputs = LatentOutputs(
        values=key_values[:, latent.plain_dim :].transpose(1, 2),
        out=weights.linear([f"{name}.o_proj"], [hidden], heads * latent.value_dim, config.output_bias),
    )
    return inputs, outputs
