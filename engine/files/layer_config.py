"""The fields of config.json of models whose layers differ in more than their kind (Gemma 4): other heads in full
layers, layers that read the cache of earlier layers, and inputs of their own for each layer."""

from __future__ import annotations

from dataclasses import dataclass

from .fields import Fields

MAX_DIM = 2**14

FIELDS = (
    "global_head_dim",
    "num_global_key_value_heads",
    "attention_k_eq_v",
    "num_kv_shared_layers",
    "use_double_wide_mlp",
    "hidden_size_per_layer_input",
    "vocab_size_per_layer_input",
    "enable_moe_block",
    "top_k_experts",
)


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The differences between the layers of a model."""

    full_kv_heads: int  # heads of keys and values in full layers
    full_head_dim: int  # dimension of a head in full layers
    keys_are_values: bool  # whether the values of full layers are their keys before norm and rotation
    shared_layers: int  # number of last layers that read the cache of the last earlier layer of their kind
    shared_mlp_factor: int  # factor of the inner size of the MLPs of these layers
    input_dim: int  # dimension of the input of its own that each layer has for a token; 0: none
    input_vocab: int  # number of embeddings of these inputs


def parse_layer_config(fields: Fields, kinds: tuple[str, ...], heads: int, kv_heads: int) -> LayerConfig:
    """Raises ModelRefused with the name of the wrong field. `heads`, `kv_heads`: of the other layers."""
    equal = fields.flag("attention_k_eq_v", False)
    default = kv_heads
    if equal and "num_global_key_value_heads" in fields:
        default = fields.integer("num_global_key_value_heads", 1, 2**10)
    dim = fields.integer("global_head_dim", 2, 2**10, 512)
    if "per_layer_config" in fields:
        table = _full_table(fields, kinds)
        default = table.integer("num_key_value_heads", 1, 2**10, kv_heads)
        dim = table.integer("head_dim", 2, 2**10)
    if heads % default:
        raise fields.refuse("num_global_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    shared = fields.integer("num_kv_shared_layers", 0, len(kinds) - 1, 0)
    if shared and set(kinds[: len(kinds) - shared]) != set(kinds):
        raise fields.refuse("num_kv_shared_layers", "fewer, because an earlier layer of each kind has the cache")
    return LayerConfig(
        full_kv_heads=default,
        full_head_dim=dim,
        keys_are_values=equal,
        shared_layers=shared,
        shared_mlp_factor=2 if fields.flag("use_double_wide_mlp", False) else 1,
        input_dim=fields.integer("hidden_size_per_layer_input", 0, MAX_DIM, 256),
        input_vocab=fields.integer("vocab_size_per_layer_input", 1, 2**24, 262_144),
    )


def _full_table(fields: Fields, kinds: tuple[str, ...]) -> Fields:
    """The table of the full layers in per_layer_config, which has equal tables for exactly these layers."""
    tables = fields.table("per_layer_config")
    names = [str(index) for index, kind in enumerate(kinds) if kind == "full"]
    values = [tables.get(name) for name in names]
    if {*tables} != {*names} or values != values[:1] * len(values):
        raise fields.refuse("per_layer_config", f"equal tables for the full layers {', '.join(names)}")
    return tables.table(names[0])
