"""Loads a model with mlx-lm. No code of a checkpoint is ever run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, load_config, load_model

from ...engine.errors import ModelRefused, SettingRefused
from ...engine.files.config_files import read_config
from ...engine.files.model_files import ModelFiles
from ...engine.files.multimodal import TIE
from ...engine.files.tensor_files import StoredTensor, read_header
from ...engine.files.tensor_names import EMBEDDING, HEAD
from ...engine.files.tied_head import with_stored_head
from ...engine.options import LoadOptions
from . import architectures, families, formats
from .adapter import Forward, observed_fields, probe_layers
from .cache import LayerShape
from .config_keys import ConfigKeys
from .weights import watch_weights

DTYPES = {"bfloat16": mx.bfloat16, "float32": mx.float32}
BITS = {"int8": 8, "int4": 4}
OTHER_BACKEND = "choose another backend, or another release of mlx-lm"
MAX_LAYERS = 1024  # maximum for a model whose tensors are unknown
GROUP = 64  # number of weights that share a scale, as in the checkpoints of mlx-community


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with its weights in memory."""

    model: nn.Module
    forward: Forward
    shapes: list[LayerShape]  # one for each layer with a cache
    quant: str  # format of quantised weights, for display
    bytes: int  # bytes of all weights
    token_bytes: int  # bytes of the weights that one token reads; 0: depends on the token


def load(files: ModelFiles, options: LoadOptions) -> Loaded:
    """Load, verify and quantise a model. Raises ModelRefused or SettingRefused."""
    try:
        model, forward, config = _load_lazily(files, options)
    except ModelRefused as error:
        raise ModelRefused(f"{files.name}: {error}", error.hint) from error
    quant = _format(config)
    if options.dtype != "auto":
        model.set_dtype(DTYPES[options.dtype])  # quantised weights keep their dtype
    if options.quant != "none":
        _quantise(model, files, options, quant)
        quant = options.quant
    mx.eval(model.parameters())
    shapes = [
        LayerShape(cache.keys.shape[1], cache.keys.shape[3], cache.values.shape[3], cache.keys.dtype, cache.window)
        for cache in probe_layers(model, forward)
    ]
    sizes = {path: weight.nbytes for path, weight in _weights(model)}
    return Loaded(model, forward, shapes, quant, sum(sizes.values()), _token_bytes(model, sizes))


def refusal_of_load(files: ModelFiles) -> str:
    """The reason why `load` would fail; empty if it would not. Reads no weights."""
    try:
        _load_lazily(files, LoadOptions())
    except ModelRefused as error:
        return str(error)
    return ""


def _load_lazily(files: ModelFiles, options: LoadOptions) -> tuple[nn.Module, Forward, dict[str, Any]]:
    """(a verified model whose weights are still lazy, its Forward, its config.json as mlx-lm changed it)."""
    try:
        return _load(files, options)
    except (LookupError, TypeError, AttributeError, ArithmeticError, NameError, AssertionError) as error:
        model_type = files.config.model_type[:50]
        message = f"its class of {model_type} fails with this config.json ({type(error).__name__}: {error!s:.200})"
        raise ModelRefused(f"it cannot be loaded by mlx-lm: {message}", OTHER_BACKEND) from error
    except (ValueError, RuntimeError, OSError) as error:
        message = " ".join(str(error).split())  # mlx-lm lists tensors in lines
        raise ModelRefused(f"it cannot be loaded by mlx-lm: {message:.300}") from error
    except (ImportError, SystemExit) as error:  # a module of mlx-lm exits if a package that it needs is missing
        raise ModelRefused("it cannot be loaded by mlx-lm: its architecture needs another package") from error


def expected_bytes(tensors: Iterable[StoredTensor], options: LoadOptions) -> int:
    """Estimated bytes of stored tensors after `load`."""
    if options.quant not in BITS:
        return sum(_decoded_bytes(tensor) for tensor in tensors)
    value_bits = BITS[options.quant] + 32 / GROUP  # each group has a scale and a bias of 16 bits
    total = 0.0
    for tensor in tensors:
        is_quantised = len(tensor.shape) == 2 and tensor.shape[1] % GROUP == 0
        total += math.prod(tensor.shape) * value_bits / 8 if is_quantised else _decoded_bytes(tensor)
    return round(total)


def _decoded_bytes(tensor: StoredTensor) -> int:
    """Bytes of a tensor as `load` decodes it: fp8 becomes bfloat16."""
    return tensor.num_bytes * (2 if tensor.dtype.startswith("F8_") else 1)


def _load(files: ModelFiles, options: LoadOptions) -> tuple[nn.Module, Forward, dict[str, Any]]:
    values = load_config(files.path)
    if values.get("model_file") is not None:
        raise ModelRefused(
            f"it contains code ({values['model_file']!s:.50} in config.json), which is never run",
            "use a model of an architecture that mlx-lm has",
        )
    completed = read_config(files.path)  # with the weight format of other files
    refusal = architectures.refusal(completed) or formats.refusal(completed, files.tensors)
    if refusal:
        raise ModelRefused(refusal)
    context = options.context or files.config.max_positions
    is_described = architectures.is_described(files.config)
    plan = _described(files, context) if is_described else _undescribed(files, values, context)
    _verify_layers(files, plan.text)
    _verify_shards(files)
    stored = formats.quantization(completed)
    if stored is not None and stored.format == "fp8":  # `watch_weights` decodes it
        plan.config["quantization_config"] = None
    elif "quantization_config" in completed:  # a field of another file
        plan.config["quantization_config"] = completed["quantization_config"]
    dtype = DTYPES.get(options.dtype, mx.bfloat16)

    def classes(config: dict[str, Any]) -> tuple[Any, Any]:  # load_model passes the argument as config=
        model_class, arguments_class = plan.classes(config)
        return lambda args: watch_weights(model_class(args), files.config, plan.text, stored, dtype), arguments_class

    with observed_fields() as fields:
        model, changed = load_model(
            files.path, lazy=True, strict=bool(files.tensors), get_model_classes=classes, model_config=plan.config
        )
        forward = Forward(model)
        probe_layers(model, forward)
    plan.verify(model, fields)
    return model, forward, changed


@dataclass(frozen=True, slots=True)
class _Plan:
    """The arguments of a load, and the check of the loaded model."""

    text: Mapping[str, Any]  # fields of config.json of the text model
    config: dict[str, Any]  # the keys to add to config.json
    classes: families.Classes
    verify: Callable[[nn.Module, set[str]], None]  # with the fields that the class reads; raises ModelRefused


def _described(files: ModelFiles, context: int) -> _Plan:
    """The plan for an architecture that ModelConfig describes."""
    config = files.config
    return _Plan(
        text={"num_hidden_layers": config.num_layers, TIE: config.tie_embeddings},
        config=families.arguments(config),
        classes=families.classes(config, context),
        verify=lambda model, fields: families.verify(model, config),
    )


def _undescribed(files: ModelFiles, values: Mapping[str, Any], context: int) -> _Plan:
    """The plan for an architecture that only mlx-lm's class describes."""
    keys = ConfigKeys(values)
    added = keys.arguments()
    if files.config.multimodal:  # the class reads the field in text_config, which transformers ignores
        added.get("text_config", added)[TIE] = files.config.tie_embeddings
    elif keys.text.get(TIE):
        _verify_head(files)
    return _Plan(keys.text, added, _get_classes, lambda model, fields: keys.verify(model, fields, context))


def _verify_head(files: ModelFiles) -> None:
    """Raises ModelRefused for a stored head that is not the embedding: transformers uses it, mlx-lm does not."""
    names = {"lm_head.weight": HEAD, "embed_tokens.weight": EMBEDDING}  # without the prefixes of multimodal models
    stored = {".".join(name.split(".")[-2:]): tensor for name, tensor in files.tensors.items()}
    tensors = {name: stored[end] for end, name in names.items() if end in stored}
    tied = replace(files, tensors=tensors, config=replace(files.config, tie_embeddings=True))
    if not with_stored_head(tied).config.tie_embeddings:
        raise ModelRefused(
            "the stored output head differs from the embedding, contrary to tie_word_embeddings in config.json, and "
            "mlx-lm uses the embedding"
        )


def _verify_shards(files: ModelFiles) -> None:
    """Raises ModelRefused for a tensor in two of the files that mlx-lm reads: the last one counts, in any order."""
    names: dict[str, str] = {}
    for file in sorted(files.path.glob("model*.safetensors")):
        for name in read_header(file):
            other = names.setdefault(name, file.name)
            if other != file.name:
                raise ModelRefused(f"the tensor {name:.100} is in {other} and in {file.name}, which mlx-lm both reads")


def _verify_layers(files: ModelFiles, text: Mapping[str, Any]) -> None:
    """Raises ModelRefused for more layers than the files have: a class creates all of them."""
    indices = [int(part) for name in files.tensors for part in name.split(".") if part.isdecimal()]
    layers = text.get("num_hidden_layers")
    if isinstance(layers, int) and layers > max(indices, default=MAX_LAYERS - 1) + 1:
        raise ModelRefused(f"config.json has {layers} layers, but its files have fewer")


def _weights(model: nn.Module) -> list[tuple[str, mx.array]]:
    return tree_flatten(model.parameters())  # type: ignore[return-value]


def _token_bytes(model: nn.Module, sizes: Mapping[str, int]) -> int:
    if any(weight.ndim > 2 for _, weight in _weights(model)):  # experts: a token reads only some of them
        return 0
    tied = not hasattr(model, "lm_head")  # a tied head reads the whole embedding table
    return sum(size for path, size in sizes.items() if tied or "embed_tokens" not in path)


def _format(config: Mapping[str, Any]) -> str:
    """The format of a quantised checkpoint, for display. `config` is mlx-lm's: it has converted the tables of other
    libraries to `quantization`."""
    table = config.get("quantization")
    if not table:
        return ""
    mode = table.get("mode", "affine")
    return f"mlx {table['bits']}-bit" if mode == "affine" else f"mlx {mode}"


def _quantise(model: nn.Module, files: ModelFiles, options: LoadOptions, stored_format: str) -> None:
    if options.quant not in BITS:
        raise SettingRefused(
            f"quant {options.quant} is not supported by mlx", f"choose one of {', '.join(BITS)}", setting="quant"
        )
    if stored_format:
        raise SettingRefused(
            f"{files.name} is quantised already ({stored_format})", "leave quant at none", setting="quant"
        )
    nn.quantize(model, GROUP, BITS[options.quant], class_predicate=_fits_quantisation)


def _fits_quantisation(_path: str, module: nn.Module) -> bool:
    """Whether a module is a projection or an embedding whose input features divide into groups."""
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % GROUP == 0
