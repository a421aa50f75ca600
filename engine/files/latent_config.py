"""The fields of config.json that describe multi-head latent attention (MLA) -> LatentConfig, validated."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .fields import Fields

MAX_DIM = 2**10
MAX_RANK = 2**14

# Only the architectures that list these fields in `optional` read them; the others ignore any value.
FIELDS = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
OPTIONAL = frozenset({*FIELDS, "rope_interleave"})


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Attention whose keys and values are projections of one vector per token, the latent (DeepSeek-V2, 2024).

    The cache stores the latent and one rotated part of the key. All heads share both.
    """

    rank: int  # dimension of the latent
    query_rank: int  # dimension of the vector from which queries are projected; 0: they are projected directly
    plain_dim: int  # dimensions of a query or key head that are not rotated
    rotary_dim: int  # dimensions of a query or key head that are rotated
    value_dim: int  # dimensions of a value head
    interleaved: bool  # whether the rotated pairs are (2i, 2i + 1); else (i, i + rotary_dim / 2)

    @property
    def head_dim(self) -> int:
        """Dimensions of a query or key head."""
        return self.plain_dim + self.rotary_dim

    @property
    def cache_dim(self) -> int:
        """Values per token and layer in the cache. Absorbed query heads have the same dimension."""
        return self.rank + self.rotary_dim

    def down_features(self, heads: int) -> int:
        """Number of outputs of the projection of the hidden state: the queries or the vector from which they are
        projected, the latent, and the rotated part of the key."""
        return (self.query_rank or heads * self.head_dim) + self.cache_dim

    def weights(self, hidden: int, heads: int) -> int:
        """Number of weights of the attention of a layer, which a token multiplies once each."""
        inner = heads * self.rank * (self.plain_dim + self.value_dim)
        return (
            hidden * (self.down_features(heads) + heads * self.value_dim)
            + self.query_rank * heads * self.head_dim
            + inner
        )

    def token_values(self, heads: int) -> int:
        """Number of intermediate values of a token: projections, absorbed queries and the outputs of attention."""
        absorbed = 2 * (heads + 1) * self.cache_dim + heads * self.rank
        return self.down_features(heads) + heads * (self.head_dim + self.value_dim) + absorbed


@dataclass(frozen=True, slots=True)
class LatentFamily:
    """The defaults of an architecture with latent attention: those of the config class in transformers."""

    rank: int = 512
    query_rank: int = 1536
    plain_dim: int = 128
    rotary_dim: int = 64
    value_dim: int = 128
    head_dim_is_rotary: bool = False  # whether head_dim is another name of qk_rope_head_dim


def parse_latent(fields: Fields, family: LatentFamily) -> LatentConfig:
    """The latent attention. Raises ModelRefused with the name of the wrong field."""
    query_rank = 0
    if not fields.null("q_lora_rank"):
        query_rank = fields.integer("q_lora_rank", 1, MAX_RANK, family.query_rank)
    if not query_rank and fields.flag("attention_bias", False):
        raise fields.refuse("attention_bias", "false, because q_lora_rank is null")
    rotary_dim = fields.integer("qk_rope_head_dim", 2, MAX_DIM, family.rotary_dim)
    if family.head_dim_is_rotary and fields.integer("head_dim", 2, MAX_DIM, rotary_dim) != rotary_dim:
        raise fields.refuse("head_dim", f"equal to qk_rope_head_dim ({rotary_dim})")
    return LatentConfig(
        rank=fields.integer("kv_lora_rank", 1, MAX_RANK, family.rank),
        query_rank=query_rank,
        plain_dim=fields.integer("qk_nope_head_dim", 1, MAX_DIM, family.plain_dim),
        rotary_dim=rotary_dim,
        value_dim=fields.integer("v_head_dim", 1, MAX_DIM, family.value_dim),
        interleaved=fields.flag_or_null("rope_interleave", True),
    )


def scale_factor(table: Fields) -> float:
    """The factor of the scores of attention that a scaled rope has in these architectures, besides that of cos and sin
    (Rope.attention_factor). `table`: the fields of the rope."""
    if table.text(table.either("rope_type", "type"), "default") == "default":
        return 1.0
    weight = table.number("mscale_all_dim", 0.0, 1e3, 0.0)
    if not weight:
        return 1.0
    extension = math.log(max(table.number("factor", 1e-3, 1e6), 1.0))
    return (0.1 * weight * extension + 1.0) ** 2
