"""The fields of config.json that give the kind of each layer: full or sliding attention, with or without a rope."""

from __future__ import annotations

from .families import Family, LayerKind
from .fields import Fields

FULL: LayerKind = "full"
SLIDING: LayerKind = "sliding"
RECURRENT: LayerKind = "recurrent"
MAX_POSITIONS = 2**27  # upper bound of the context length


def parse_layer_kinds(fields: Fields, family: Family) -> tuple[tuple[LayerKind, ...], int]:
    """(kind of each layer, window). The window is 0 if no layer is sliding."""
    layers = fields.integer("num_hidden_layers", 1, 2**10)
    window = _window(fields, family)
    if fields.either("layer_types", "layers_block_type") in fields and family.layer_types:
        kinds = _listed_kinds(fields, family, layers)
    else:
        kinds = _default_kinds(fields, family, layers, window)
        _check_kinds(fields, family, kinds)
    if family.last_full:
        kinds = (*kinds[:-1], FULL)
    if RECURRENT in kinds and set(kinds) == {RECURRENT}:
        raise fields.refuse("layer_types", "a list with attention (models without attention are not supported)")
    if "sliding" not in kinds:
        return kinds, 0
    if window:
        return kinds, window
    if "sliding_window" in fields:
        raise fields.refuse("use_sliding_window", "true, because there are sliding layers")
    raise fields.refuse("sliding_window", "an integer, because there are sliding layers")


def _check_kinds(fields: Fields, family: Family, kinds: tuple[LayerKind, ...]) -> None:
    """Refuse a layer_types field that differs from the kinds of an architecture with one kind of layer."""
    if "layer_types" in fields and _listed_kinds(fields, family, len(kinds)) != kinds:
        raise fields.refuse("layer_types", f"{kinds[0]}_attention for every layer (this architecture has one kind)")


def _window(fields: Fields, family: Family) -> int:
    if not fields.flag("use_sliding_window", family.windowed):
        return 0
    default = 0 if fields.null("sliding_window") and family.null_window else family.window
    # transformers 5 writes 0 for Qwen 2 with experts and without a window.
    window = fields.integer("sliding_window", 0 if family.alternating else 1, 2**63, default)
    return min(window, MAX_POSITIONS)


def _default_kinds(fields: Fields, family: Family, layers: int, window: int) -> tuple[LayerKind, ...]:
    """The kinds of the layers if config.json has no layer_types field."""
    if family.pattern:
        pattern = fields.integer("sliding_window_pattern", 1, layers + 6, family.pattern)
        period = (SLIDING,) * (pattern - 1) + (FULL,)
        return tuple(period[layer % pattern] for layer in range(layers))
    if family.alternating:
        return _alternating_kinds(fields, family, layers)
    if family.attention_interval:
        interval = fields.integer("full_attention_interval", 1, 2**10, family.attention_interval)
        return tuple(RECURRENT if (layer + 1) % interval else FULL for layer in range(layers))
    if family.attention_indices in fields:
        indices = fields.indices(family.attention_indices)
        return tuple(FULL if layer in indices else RECURRENT for layer in range(layers))
    if family.mamba:
        return (RECURRENT,) * layers
    if family.no_rope_interval:
        return tuple(
            FULL if has_rope or not window else SLIDING for has_rope in _listed_rope_layers(fields, family, layers)
        )
    first_sliding = layers
    if window:
        first_sliding = min(layers, fields.integer("max_window_layers", 0, 2**10, family.window_layers))
    return (FULL,) * first_sliding + (SLIDING,) * (layers - first_sliding)


def _alternating_kinds(fields: Fields, family: Family, layers: int) -> tuple[LayerKind, ...]:
    """Every second layer is sliding, from the first one on, up to the layer max_window_layers."""
    end = 0
    if fields.flag("use_sliding_window", family.windowed):
        end = fields.integer("max_window_layers", 0, 2**10, family.window_layers or layers)
    return tuple(SLIDING if index % 2 == 0 and index < end else FULL for index in range(layers))


def _listed_kinds(fields: Fields, family: Family, layers: int) -> tuple[LayerKind, ...]:
    name = fields.either("layer_types", "layers_block_type")
    names = fields.texts(name)
    kinds = family.layer_names
    if len(names) != layers or not set(names) <= kinds.keys():
        raise fields.refuse(name, f"a list of {layers} names, each one of {', '.join(kinds)}")
    return tuple(kinds[name] for name in names)


def parse_rope_layers(fields: Fields, family: Family, kinds: tuple[LayerKind, ...]) -> tuple[bool, ...]:
    """Whether each layer has a rope; empty if all layers have one."""
    if "position_embedding_type" in family.optional and fields.get("position_embedding_type") != "rope":
        return (False,) * len(kinds)
    if family.full_ropes == "never" or (family.full_ropes == "unmixed" and not fields.null("sliding_window")):
        return tuple(kind == SLIDING for kind in kinds)
    return _listed_rope_layers(fields, family, len(kinds)) if family.no_rope_interval else ()


def _listed_rope_layers(fields: Fields, family: Family, layers: int) -> tuple[bool, ...]:
    """Whether each layer has a rope, by no_rope_layers or no_rope_layer_interval."""
    if "no_rope_layers" in fields and not (family.chunked and fields.get("no_rope_layers") == []):
        flags = fields.get("no_rope_layers")
        if not isinstance(flags, list) or len(flags) < layers or not {*map(repr, flags)} <= {"0", "1"}:
            raise fields.refuse("no_rope_layers", f"a list of {layers} numbers, 1 for a layer with a rope, else 0")
        return tuple(flag == 1 for flag in flags[:layers])
    interval = fields.integer("no_rope_layer_interval", 1, 2**10, family.no_rope_interval)
    return tuple((index + 1) % interval != 0 for index in range(layers))
