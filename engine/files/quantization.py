"""quantization_config of config.json -> Quantization, the weight format of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from ..errors import ModelRefused
from .fields import Fields

Quant = Literal["none", "int8", "int4", "fp8", "fp8_w8a8"]  # formats for quantisation while loading
Method = Literal["gptq", "awq", "compressed-tensors", "fp8", "mxfp4", "modelslim", "foreign"]

MODELSLIM_TYPES = ("FLOAT", "W8A8", "W8A8_DYNAMIC")
SINGLE_GROUP = 32  # group sizes are multiples of this


@dataclass(frozen=True, slots=True)
class Quantization:
    """The weight format of a checkpoint. The stored tensors show which projections are quantised."""

    method: Method
    # foreign: only the library that wrote the files can read them.
    format: Literal["int4", "int8", "fp8", "mxfp4", "nvfp4", "foreign"]
    group: int = 0  # inputs per scale; 0: one scale per output
    block: int = 0  # outputs per scale of a block; 0: one scale per output or per tensor
    symmetric: bool = True  # True: the format has no zero points
    zeros_less_one: bool = False  # stored zero points are one less than the real ones
    act_order: bool = False  # activation order: groups use a stored permutation of the inputs
    rounds_activations: bool = False  # whether activations are quantised to the same number of bits

    @property
    def title(self) -> str:
        """The display name of the format."""
        return f"{self.method} {self.format}" if self.method != self.format else self.format


# Value of actorder in compressed-tensors -> whether the groups use a stored permutation of the inputs.
_ORDERS: Mapping[str | bool, bool] = MappingProxyType(
    {"group": True, "dynamic": True, True: True, "weight": False, "static": False, False: False}
)


def parse_quantization(fields: Fields, where: str = "config.json") -> Quantization | None:
    """The weight format that config.json names; None if the weights are not quantised. Raises ModelRefused, with the
    name of the field, for an unsupported format."""
    if "quantization" in fields and "bits" in fields.table("quantization"):
        return Quantization("foreign", "foreign")  # if quantization_config is present too, it has the same content
    key = fields.either("quantization_config", "compression_config")
    if key not in fields:
        return None
    table = fields.table(key)
    default = next((method for field, method in _FIELDS_OF_METHODS.items() if field in table), "unnamed")
    method = table.text("quant_method", default)
    reader = _READERS.get(method)
    if reader is None:
        raise ModelRefused(
            f"{where}: weights quantised by {method:.50} are not supported",
            f"supported: {', '.join(_READERS)}; or use a bf16 model",
        )
    return reader(table)


# Field of quantization_config -> the method of files without quant_method.
_FIELDS_OF_METHODS = {"config_groups": "compressed-tensors", "model_quant_type": "modelslim"}


def _gptq(table: Fields) -> Quantization:
    _require_bits(table, "bits", 4)
    version = _layout(table, "gptq", "gptq_v2")
    if table.flag("is_marlin_format", False):
        raise table.refuse("is_marlin_format", "false")
    _refuse_extensions(table)
    group = _group(table)
    return Quantization(
        "gptq",
        "int4",
        group,
        symmetric=False,
        zeros_less_one=version == "gptq",
        act_order=table.flag("desc_act", False) and group > 0,
    )


def _awq(table: Fields) -> Quantization:
    _require_bits(table, "bits", 4)
    table.choice("version", ("gemm", "GEMM"), "gemm", expected="gemm")
    if table.text("backend", "autoawq") == "llm-awq":
        raise table.refuse("backend", "autoawq (llm-awq packs weights in another order)")
    _layout(table, "gemm")
    _refuse_extensions(table)
    return Quantization("awq", "int4", _group(table), symmetric=not table.flag("zero_point", True))


def _layout(table: Fields, *supported: str) -> str:
    """The value of checkpoint_format or format (newer files have both); the first of `supported` if both are absent."""
    default, *_ = supported
    older = table.choice("format", supported, default)
    layout = table.choice("checkpoint_format", supported, older)
    if layout != older and "format" in table:
        raise table.refuse("format", f"{layout}, the value of checkpoint_format")
    return layout


def _refuse_extensions(table: Fields) -> None:
    """Refuse extensions of GPTQModel that change the result."""
    for name in table.table("dynamic"):
        if not name.startswith("-:"):  # a name with this prefix is an unquantised projection
            raise table.refuse(
                "dynamic", "a list of names with the prefix -: (projections of different formats are not supported)"
            )
    table.choice("pack_dtype", ("int32",), "int32")
    for key in ("adapter", "rotation"):
        table.forbid(key, "it changes the result and is not supported")


def _fp8(table: Fields) -> Quantization:
    table.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3", expected="e4m3")
    _refuse_quantised_cache(table)
    if "weight_block_size" not in table:
        return Quantization("fp8", "fp8")
    outputs, inputs = _block(table, "weight_block_size")
    return Quantization("fp8", "fp8", group=inputs, block=outputs)


def _modelopt(table: Fields) -> Quantization | None:
    """Read the format of NVIDIA ModelOpt: its FP8 has one scale for each weight. Activations are not quantised."""
    algorithm = table.text("quant_algo", "")  # absent: only the KV cache is quantised
    for key in ("kv_cache_quant_algo", "kv_cache_scheme"):
        if key in table:
            table.warn(key, "ignored: the KV cache is not quantised")
    if algorithm not in ("", "FP8"):
        raise ModelRefused(
            f"weights quantised by NVIDIA ModelOpt as {algorithm:.50} are not supported (config.json: "
            "quantization_config, or hf_quant_config.json)",
            "use FP8 files of ModelOpt, files in the compressed-tensors format, or a bf16 model",
        )
    return Quantization("fp8", "fp8") if algorithm else None


def _mxfp4(table: Fields) -> Quantization:
    _refuse_quantised_cache(table)
    return Quantization("mxfp4", "mxfp4", group=SINGLE_GROUP)


def _modelslim(table: Fields) -> Quantization:
    """Read the description of Ascend's msModelSlim, which has a field with the type of each tensor."""
    for key in ("kv_quant_type", "kv_cache_type", "fa_quant_type", "reduce_quant_type"):
        if table.text(key, "FLOAT") not in ("", "FLOAT"):
            raise table.refuse(key, "FLOAT (a quantised KV cache, attention or reduction is not supported)")
    for key in ("metadata", "optional"):
        for name in table.table(key):
            if "quarot" in name.lower():
                raise table.refuse(key, "without quarot (rotated activations are not supported)")
            table.warn(key, "ignored")
    for key in table:
        if key == "model_quant_type" or key.endswith((".weight", ".bias", "_scale", "_offset", "_bias")):
            table.choice(key, MODELSLIM_TYPES, "FLOAT")
    return Quantization("modelslim", "int8", rounds_activations=True)


def _block(table: Fields, key: str) -> tuple[int, int]:
    """The size of the block of weights that shares a scale: (outputs, inputs)."""
    outputs, inputs = table.numbers(key, 2)
    if outputs % 1 or inputs % SINGLE_GROUP:
        raise table.refuse(key, f"[outputs, inputs]: two integers, inputs a multiple of {SINGLE_GROUP}")
    return int(outputs), int(inputs)


def _refuse_quantised_cache(table: Fields) -> None:
    table.forbid("kv_cache_scheme", "a quantised KV cache is not supported")


def _compressed(table: Fields) -> Quantization:
    """Read the format of compressed-tensors (llm-compressor)."""
    table.choice("quantization_status", ("compressed",), "compressed")
    if table.table("sparsity_config").text("format", "dense") != "dense":
        raise table.refuse("sparsity_config", "dense")
    _refuse_quantised_cache(table)
    if len(table.table("transform_config").table("config_groups")):
        raise table.refuse("transform_config", "empty (rotated activations are not supported)")
    groups = table.table("config_groups")
    if len(groups) != 1:
        raise table.refuse("config_groups", "one group (projections of different formats are not supported)")
    scheme = groups.table(next(iter(groups)))
    scheme.forbid("output_activations", "quantised outputs are not supported")
    return _COMPRESSED_READERS[_compressed_format(table, scheme)](scheme)


def _compressed_format(table: Fields, scheme: Fields) -> str:
    """The format, as a key of _COMPRESSED_READERS."""
    name = table.text("format", scheme.text("format", "unnamed"))
    if name == "naive-quantized":
        integers = scheme.table("weights").text("type", "int") == "int"
        return "int-quantized" if integers else "float-quantized"
    if name not in _COMPRESSED_READERS:
        raise table.refuse("format", ", ".join(_COMPRESSED_READERS))
    return name


def _packed_int4(scheme: Fields) -> Quantization:
    weights = scheme.table("weights")
    group = _group(weights)
    _require_bits(weights, "num_bits", 4)
    weights.choice("type", ("int",), "int")
    _strategy(weights, group, "group", "channel")
    if scheme.table("input_activations"):
        raise scheme.refuse("input_activations", "absent (int4 weights need unquantised activations)")
    order = weights.text_or_flag("actorder", _ORDERS)
    return Quantization(
        "compressed-tensors",
        "int4",
        group,
        symmetric=weights.flag("symmetric", True),
        act_order=_ORDERS[order] and group > 0,
    )


def _int8(scheme: Fields) -> Quantization:
    weights = scheme.table("weights")
    weights.choice("type", ("int",), "int")
    _require_bits(weights, "num_bits", 8)
    _strategy(weights, _group(weights), "channel", "tensor")
    if not weights.flag("symmetric", True):
        raise weights.refuse("symmetric", "true (int8 weights with zero points are not supported)")
    activations = scheme.table("input_activations")
    if activations:
        supported = activations.flag("dynamic", False) and activations.flag("symmetric", True)
        if not supported:
            raise scheme.refuse("input_activations", "symmetric and dynamic (static scales are not supported)")
        _require_bits(activations, "num_bits", 8, default=8)
    return Quantization("compressed-tensors", "int8", rounds_activations=bool(activations))


def _float8(scheme: Fields) -> Quantization:
    weights = scheme.table("weights")
    _require_bits(weights, "num_bits", 8)
    if _strategy(weights, _group(weights), "channel", "tensor", "block") != "block":
        return Quantization("compressed-tensors", "fp8")
    outputs, inputs = _block(weights, "block_structure")
    return Quantization("compressed-tensors", "fp8", group=inputs, block=outputs)


def _float4(name: Literal["mxfp4", "nvfp4"], group: int, strategy: str) -> Callable[[Fields], Quantization]:
    """The reader of a format of floats of 4 bits, with a scale for `group` inputs. Activations are not quantised,
    although the files may describe it."""

    def read(scheme: Fields) -> Quantization:
        weights = scheme.table("weights")
        _require_bits(weights, "num_bits", 4)
        weights.choice("type", ("float",), "float")
        weights.choice("strategy", (strategy,), strategy)
        if weights.integer("group_size", 1, 2**20, group) != group:
            raise weights.refuse("group_size", f"{group} ({name})")
        if not weights.flag("symmetric", True):
            raise weights.refuse("symmetric", f"true ({name} has no zero points)")
        return Quantization("compressed-tensors", name, group)

    return read


def _require_bits(table: Fields, key: str, bits: int, default: int | None = None) -> None:
    if table.integer(key, 0, 64, default) != bits:
        raise table.refuse(key, f"{bits} (other bit widths are not supported)")


def _group(table: Fields) -> int:
    """The value of group_size: inputs per scale. 0: one scale per output (-1 in the file)."""
    size = table.integer("group_size", -1, 2**20, -1)
    if size == -1:
        return 0
    if size == 0 or size % SINGLE_GROUP:
        raise table.refuse("group_size", f"a multiple of {SINGLE_GROUP}, or -1 for one scale per output")
    return size


def _strategy(weights: Fields, group: int, *supported: str) -> str:
    """Which weights share a scale: a group, an output channel, a block or the whole tensor. If the field is absent, the
    group size decides. Raises ModelRefused if the value in the file is not in `supported`."""
    return weights.choice("strategy", supported, "group" if group else "channel")


_READERS: Mapping[str, Callable[[Fields], Quantization | None]] = MappingProxyType(
    {
        "gptq": _gptq,
        "awq": _awq,
        "compressed-tensors": _compressed,
        "fp8": _fp8,
        "modelopt": _modelopt,
        "modelslim": _modelslim,
        "mxfp4": _mxfp4,
    }
)
_COMPRESSED_READERS: Mapping[str, Callable[[Fields], Quantization]] = MappingProxyType(
    {
        "pack-quantized": _packed_int4,
        "int-quantized": _int8,
        "float-quantized": _float8,
        "nvfp4-pack-quantized": _float4("nvfp4", 16, "tensor_group"),
        "mxfp4-pack-quantized": _float4("mxfp4", SINGLE_GROUP, "group"),
    }
)
