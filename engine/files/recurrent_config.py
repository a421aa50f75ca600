"""The fields of config.json that describe layers with a recurrent state, validated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .fields import Fields

DeltaProjections = Literal["interleaved", "separate"]  # see DeltaConfig.interleaved

MAX_HEADS = 2**10
MAX_DIM = 2**10
MAX_WIDTH = 2**6


@dataclass(frozen=True, slots=True)
class StateShapes:
    """The recurrent state of a sequence in one layer, float32."""

    conv: tuple[int, int]  # (width - 1, channels): the last inputs of a causal convolution
    scan: tuple[int, int, int] = (0, 0, 0)  # (heads, key dim, value dim) of the matrices; zeros: there are none

    @property
    def values(self) -> int:
        """Number of values of the state."""
        history, channels = self.conv
        heads, key_dim, value_dim = self.scan
        return history * channels + heads * key_dim * value_dim


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """Gated DeltaNet: a convolution over queries, keys and values, then the delta rule (kernels/ops/state.py)."""

    key_heads: int
    value_heads: int  # a multiple of key_heads
    key_dim: int
    value_dim: int
    conv_width: int
    # Whether the files have one projection to queries, keys, values and gates, with these side by side for each key
    # head, and such a projection to b and a; otherwise there is a projection for each of b and a, one for the gates,
    # and one for the others.
    interleaved: bool

    @property
    def keys(self) -> int:
        """Number of values of all keys of a token; also of its queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Number of values of all values of a token; also of its gates."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def shapes(self) -> StateShapes:
        conv = self.conv_width - 1, self.channels
        return StateShapes(conv, (self.value_heads, self.key_dim, self.value_dim))

    @property
    def outputs(self) -> int:
        """Number of outputs of the largest projection."""
        return self.channels + self.values

    def weights(self, hidden: int) -> int:
        """Number of weights that a token multiplies in one layer."""
        return hidden * (self.channels + self.values + 2 * self.value_heads + self.values)

    def adapter_values(self, hidden: int) -> int:
        """Numbers of the LoRA factors of rank 1: four input projections and an output projection."""
        return 4 * hidden + self.channels + self.values + 2 * self.value_heads + self.values + hidden


@dataclass(frozen=True, slots=True)
class ConvConfig:
    """A short convolution with gates (LFM2): no matrices, only the last inputs of the convolution."""

    channels: int  # the hidden size
    conv_width: int
    bias: bool  # of the convolution and of both projections

    @property
    def shapes(self) -> StateShapes:
        return StateShapes((self.conv_width - 1, self.channels))

    @property
    def outputs(self) -> int:
        """Number of outputs of the largest projection."""
        return 3 * self.channels

    def weights(self, hidden: int) -> int:
        """Number of weights that a token multiplies in one layer."""
        return hidden * 4 * self.channels

    def adapter_values(self, hidden: int) -> int:
        """Numbers of the LoRA factors of rank 1: an input projection and an output projection."""
        return 2 * hidden + 4 * self.channels


DELTA = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "attn_output_gate",
)


@dataclass(frozen=True, slots=True)
class MambaConfig:
    """Mamba2: a convolution over x, B and C, then the scan `ssd` (kernels/ops/state.py)."""

    heads: int  # a multiple of groups
    head_dim: int
    groups: int
    state_dim: int
    conv_width: int
    conv_bias: bool
    bias: bool  # of both projections

    @property
    def values(self) -> int:
        """Number of values of x of a token; also of its gates."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: x, B and C."""
        return self.values + 2 * self.groups * self.state_dim

    @property
    def shapes(self) -> StateShapes:
        return StateShapes((self.conv_width - 1, self.channels), (self.heads, self.state_dim, self.head_dim))

    @property
    def outputs(self) -> int:
        """Number of outputs of the largest projection."""
        return self.values + self.channels + self.heads

    def weights(self, hidden: int) -> int:
        """Number of weights that a token multiplies in one layer."""
        return hidden * (self.outputs + self.values)

    def adapter_values(self, hidden: int) -> int:
        """Numbers of the LoRA factors of rank 1: an input projection and an output projection."""
        return 2 * hidden + self.outputs + self.values


CONV = ("conv_L_cache", "conv_bias")
MAMBA = (
    "mamba_n_heads",
    "mamba_n_groups",
    "mamba_d_state",
    "mamba_d_head",
    "mamba_d_conv",
    "mamba_expand",
    "mamba_conv_bias",
    "mamba_proj_bias",
    "time_step_limit",
)
NO_LIMITS = (None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}])  # transformers writes the last one
OPTIONAL = frozenset((*DELTA, *CONV, *MAMBA))


def parse_mamba(fields: Fields, hidden: int) -> MambaConfig:
    """Mamba2 with the field names and the defaults of Granite and Bamba. Raises ModelRefused."""
    heads = fields.integer("mamba_n_heads", 1, MAX_HEADS, 128)
    values = fields.integer("mamba_expand", 1, MAX_WIDTH, 2) * hidden
    head_dim = values // heads
    if fields.get("mamba_d_head") != "auto":
        head_dim = fields.integer("mamba_d_head", 1, MAX_DIM, head_dim)
    groups = fields.integer("mamba_n_groups", 1, MAX_HEADS, 1)
    if heads * head_dim != values:
        raise fields.refuse("mamba_n_heads", f"a divisor of mamba_expand * hidden_size ({values}), by mamba_d_head")
    if heads % groups:
        raise fields.refuse("mamba_n_groups", f"a divisor of mamba_n_heads ({heads})")
    if fields.get("time_step_limit") not in NO_LIMITS:
        raise fields.refuse("time_step_limit", "[0, Infinity]")
    return MambaConfig(
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_dim=fields.integer("mamba_d_state", 1, MAX_DIM, 256),
        conv_width=fields.integer("mamba_d_conv", 2, MAX_WIDTH, 4),
        conv_bias=fields.flag("mamba_conv_bias", True),
        bias=fields.flag("mamba_proj_bias", False),
    )


def parse_conv(fields: Fields, hidden: int) -> ConvConfig:
    """The short convolution of LFM2, with the defaults of transformers. Raises ModelRefused."""
    width = fields.integer("conv_L_cache", 2, MAX_WIDTH, 3)
    return ConvConfig(channels=hidden, conv_width=width, bias=fields.flag("conv_bias", False))


def parse_delta(fields: Fields, projections: DeltaProjections) -> DeltaConfig:
    """The Gated DeltaNet of the Qwen family, with the defaults of transformers. Raises ModelRefused."""
    delta = DeltaConfig(
        key_heads=fields.integer("linear_num_key_heads", 1, MAX_HEADS, 16),
        value_heads=fields.integer("linear_num_value_heads", 1, MAX_HEADS, 32),
        key_dim=fields.integer("linear_key_head_dim", 1, MAX_DIM, 128),
        value_dim=fields.integer("linear_value_head_dim", 1, MAX_DIM, 128),
        conv_width=fields.integer("linear_conv_kernel_dim", 2, MAX_WIDTH, 4),
        interleaved=projections == "interleaved",
    )
    if delta.value_heads % delta.key_heads:
        raise fields.refuse("linear_num_value_heads", f"a multiple of linear_num_key_heads ({delta.key_heads})")
    if not fields.flag("attn_output_gate", True):
        raise fields.refuse("attn_output_gate", "true (transformers ignores it for this architecture)")
    return delta
