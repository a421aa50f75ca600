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

    def weights(self, hidden: int) -> int:
        """Number of weights that a token multiplies in one layer."""
        return hidden * (self.channels + self.values + 2 * self.value_heads + self.values)


DELTA = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "attn_output_gate",
)
OPTIONAL = frozenset(DELTA)


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
