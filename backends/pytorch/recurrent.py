"""Builds layers with a recurrent state (kernels/ops/mixer.py) from a model's files."""

from __future__ import annotations

import torch

from ...engine.files.families import LayerKind
from ...engine.files.model_config import ModelConfig
from ...engine.files.recurrent_config import DeltaConfig
from ...kernels.ops.conv import ConvMixer, ConvScan
from ...kernels.ops.delta import DeltaMixer, DeltaScan, Reordered
from ...kernels.ops.mamba import MambaMixer, MambaScan
from ...kernels.ops.mixer import Mixer, MixerLayer
from ...kernels.ops.mlp import Mlp
from ...kernels.ops.projection import Projection
from .experts import gated_mlp
from .layers import Norms
from .weights import Weights


class RecurrentLayer:
    """A layer with a recurrent mixer and an MLP."""

    def __init__(
        self,
        weights: Weights,
        config: ModelConfig,
        index: int,
        mixer: Mixer,
        *,
        mlp: Mlp | None,
        norms: Norms = Norms(),
        offset: float = 0.0,
    ) -> None:
        """`mlp`: None for a dense MLP. `offset`: added to the weights of the norms."""
        name = f"model.layers.{index}"
        hidden = config.hidden_size
        self.kind: LayerKind = config.layer_kinds[index]
        self.prepared = MixerLayer(
            before_mixer=weights.take(f"{name}.{norms.before_attention}.weight", (hidden,)),
            before_mlp=weights.take(f"{name}.{norms.before_mlp}.weight", (hidden,)),
            mixer=mixer,
            mlp=mlp or gated_mlp(weights, config, f"{name}.mlp", config.intermediate_size),
            eps=config.norm_eps,
            offset=offset,
        )


def conv_mixer(weights: Weights, config: ModelConfig, index: int) -> ConvMixer:
    """The short convolution of a layer. Raises ModelRefused for missing or wrong tensors."""
    conv = config.conv
    assert conv is not None
    name = f"model.layers.{index}.conv"
    hidden = config.hidden_size
    return ConvMixer(
        inputs=weights.linear([f"{name}.in_proj"], [conv.outputs], hidden, conv.bias),
        scan=ConvScan(
            layer=config.state_layers.index(index),
            width=conv.channels,
            weight=_conv_weight(weights, name + ".conv", conv.channels, conv.conv_width),
            bias=weights.take(f"{name}.conv.bias", (conv.channels,)) if conv.bias else None,
        ),
        out=weights.linear([f"{name}.out_proj"], [hidden], conv.channels, conv.bias),
    )


def mamba_mixer(weights: Weights, config: ModelConfig, index: int, name: str = "mamba") -> MambaMixer:
    """The Mamba2 `name` of a layer. Raises ModelRefused for missing or wrong tensors."""
    mamba = config.mamba
    assert mamba is not None
    name = f"model.layers.{index}.{name}"
    hidden = config.hidden_size
    heads = (mamba.heads,)
    return MambaMixer(
        inputs=weights.linear([f"{name}.in_proj"], [mamba.outputs], hidden, mamba.bias),
        scan=MambaScan(
            layer=config.state_layers.index(index),
            width=mamba.values,
            weight=_conv_weight(weights, f"{name}.conv1d", mamba.channels, mamba.conv_width),
            bias=weights.take(f"{name}.conv1d.bias", (mamba.channels,)) if mamba.conv_bias else None,
            rates=weights.take(f"{name}.A_log", heads).float().exp(),
            dt_bias=weights.take(f"{name}.dt_bias", heads).float(),
            skip=weights.take(f"{name}.D", heads).float(),
        ),
        norm=weights.take(f"{name}.norm.weight", (mamba.values,)).unflatten(0, (mamba.groups, -1)),
        out=weights.linear([f"{name}.out_proj"], [hidden], mamba.values, mamba.bias),
        eps=config.norm_eps,
    )


def _conv_weight(weights: Weights, name: str, channels: int, width: int) -> torch.Tensor:
    """The weight [width, channels] of a causal convolution."""
    return weights.take(f"{name}.weight", (channels, 1, width)).squeeze(1).t().contiguous()


def delta_mixer(weights: Weights, config: ModelConfig, index: int) -> DeltaMixer:
    """The Gated DeltaNet of a layer. Raises ModelRefused for missing or wrong tensors."""
    delta = config.delta
    assert delta is not None
    name = f"model.layers.{index}.linear_attn"
    hidden = config.hidden_size
    heads = delta.value_heads
    conv = _conv_weight(weights, f"{name}.conv1d", delta.channels, delta.conv_width)
    inputs, rates = _inputs(weights, delta, hidden, name, conv.device)
    return DeltaMixer(
        inputs=inputs,
        rates=rates,
        scan=DeltaScan(
            layer=config.state_layers.index(index),
            width=delta.values,
            weight=conv,
            rates=weights.take(f"{name}.A_log", (heads,)).float().exp(),
            dt_bias=weights.take(f"{name}.dt_bias", (heads,)).float(),
        ),
        norm=weights.take(f"{name}.norm.weight", (delta.value_dim,)),
        out=weights.linear([f"{name}.out_proj"], [hidden], delta.values),
        eps=config.norm_eps,
    )


def _inputs(
    weights: Weights, delta: DeltaConfig, hidden: int, name: str, device: torch.device
) -> tuple[Projection, Projection]:
    """The projections to queries, keys, values and gates, and to b and a. The second one has few outputs and is never
    quantised while loading: each of its outputs decides how long a head remembers."""
    heads = delta.value_heads
    if not delta.interleaved:
        parts = [f"{name}.in_proj_qkv", f"{name}.in_proj_z"]
        inputs = weights.linear(parts, [delta.channels, delta.values], hidden)
        return inputs, weights.linear([f"{name}.in_proj_b", f"{name}.in_proj_a"], [heads] * 2, hidden, quantise=False)
    shared = heads // delta.key_heads
    mixed = weights.linear([f"{name}.in_proj_qkvz"], [delta.channels + delta.values], hidden)
    rates = weights.linear([f"{name}.in_proj_ba"], [2 * heads], hidden, quantise=False)
    sizes = delta.key_dim, delta.key_dim, shared * delta.value_dim, shared * delta.value_dim
    return (
        Reordered(mixed, _order(delta.key_heads, sizes).to(device)),
        Reordered(rates, _order(delta.key_heads, (shared, shared)).to(device)),
    )


def _order(heads: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """The outputs of a projection whose files have all parts of a head side by side: the first part of all heads, then
    the second part of all heads, and so on. `sizes`: the sizes of the parts of a head."""
    of_head = torch.arange(heads * sum(sizes)).view(heads, sum(sizes))
    return torch.cat([part.flatten() for part in of_head.split(sizes, dim=1)])
