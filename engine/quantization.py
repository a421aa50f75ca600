"""quantization_config of config.json -> Quantization, the weight format of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from .errors import ModelRefused
from .fields import Fields

Quant = Literal["none", "int8", "int4", "fp8"]  # formats for quantisation while loading
Method = Literal["gptq", "awq", "compressed-tensors", "fp8", "foreign"]

SINGLE_GROUP = 32  # group sizes are multiples of this


@dataclass(frozen=True, slots=True)
class Quantization:
    """The weight format of a checkpoint. The stored tensors show which projections are quantised."""

    method: Method
    format: Literal["int4", "int8", "fp8", "foreign"]  # foreign: only the library that wrote it can read it
    group: int = 0  # inputs per scale; 0: one scale per output
    block: int = 0  # outputs per scale of a block; 0: one scale per output or per tensor
    symmetric: bool = True  # no zero points
    zeros_less_one: bool = False  # stored zero points are one less than the real ones
    act_order: bool = False  # activation order: groups use a stored permutation of the inputs
    rounds_activations: bool = False  # activations are quantised to the same width

    @property
    def title(self) -> str:
        """Name to show to the user."""
        return f"{self.method} {self.format}" if self.method != self.format else self.format


# actorder of compressed-tensors -> True if the groups use the quantisation order of the inputs.
_ORDERS: Mapping[str | bool, bool] = MappingProxyType(
    {"group": True, "dynamic": True, True: True, "weight": False, "static": False, False: False}
)


def parse_quantization(fields: Fields, where: str = "config.json") -> Quantization | None:
    """None if config.json has no quantisation. Raises ModelRefused, with the field, for an unsupported format."""
    if "quantization" in fields and "bits" in fields.table("quantization"):
        return Quantization("foreign", "foreign")  # a quantization_config beside it has the same content
    for key in ("quantization_config", "compression_config"):
        if key in fields:
            table = fields.table(key)
            method = table.text("quant_method", "compressed-tensors" if "config_groups" in table else "unnamed")
            reader = {"gptq": _gptq, "awq": _awq, "fp8": _fp8, "compressed-tensors": _compressed}.get(method)
            if reader is None:
                raise ModelRefused(
                    f"{where}: weights quantised by {method:.50} are not supported",
                    "supported: gptq, awq, compressed-tensors, fp8; or use a bf16 model",
                )
            return reader(table)
    return None


def _gptq(table: Fields) -> Quantization:
    _only(table, "bits", table.integer("bits", 0, 64), 4)
    version = _layout(table, "gptq", "gptq_v2")
    if table.flag("is_marlin_format", False):
        raise table.refuse("is_marlin_format", "false")
    _plain(table)
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
    _only(table, "bits", table.integer("bits", 0, 64), 4)
    if table.text("version", "gemm").lower() != "gemm":
        raise table.refuse("version", "gemm")
    if table.text("backend", "autoawq") == "llm-awq":
        raise table.refuse("backend", "autoawq (llm-awq packs weights in another order)")
    _layout(table, "gemm")
    _plain(table)
    return Quantization("awq", "int4", _group(table), symmetric=not table.flag("zero_point", True))


def _layout(table: Fields, *known: str) -> str:
    """The value of checkpoint_format or format (newer files have both); the first of `known` if both are absent."""
    named = [(key, table.text(key)) for key in ("checkpoint_format", "format") if key in table]
    for key, name in named:
        if name not in known or name != named[0][1]:
            raise table.refuse(
                key, " or ".join(known) + (", with the same value in both keys" if name in known else "")
            )
    return named[0][1] if named else known[0]


def _plain(table: Fields) -> None:
    """Refuse extensions of GPTQModel that change the result."""
    if any(not name.startswith("-:") for name in table.table("dynamic")):  # -: names unquantised projections
        raise table.refuse(
            "dynamic", "a list of exceptions only (-:); projections of different formats are not supported"
        )
    if table.text("pack_dtype", "int32") != "int32":
        raise table.refuse("pack_dtype", "int32")
    for key in ("adapter", "rotation"):
        if key in table:
            raise table.refuse(key, "absent (it changes the result and is not supported)")


def _fp8(table: Fields) -> Quantization:
    if table.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise table.refuse("fmt", "e4m3")
    _no_quantised_cache(table)
    if "weight_block_size" not in table:
        return Quantization("fp8", "fp8")
    outputs, inputs = _blocks(table, "weight_block_size")
    return Quantization("fp8", "fp8", group=inputs, block=outputs)


def _blocks(table: Fields, key: str) -> tuple[int, int]:
    """(outputs, inputs) per scale."""
    outputs, inputs = table.numbers(key, 2)
    if outputs % 1 or inputs % SINGLE_GROUP:
        raise table.refuse(key, f"[outputs, inputs]: integers, inputs a multiple of {SINGLE_GROUP}")
    return int(outputs), int(inputs)


def _no_quantised_cache(table: Fields) -> None:
    if "kv_cache_scheme" in table:
        raise table.refuse("kv_cache_scheme", "absent (a quantised KV cache is not supported)")


def _compressed(table: Fields) -> Quantization:
    """Read the format of compressed-tensors (llm-compressor)."""
    status = table.text("quantization_status", "compressed")
    if status != "compressed":
        raise table.refuse("quantization_status", "compressed")
    if "sparsity_config" in table and table.table("sparsity_config").text("format", "dense") != "dense":
        raise table.refuse("sparsity_config", "dense")
    _no_quantised_cache(table)
    if len(table.table("transform_config").table("config_groups")):
        raise table.refuse("transform_config", "empty (rotated activations are not supported)")
    groups = table.table("config_groups")
    if len(groups) != 1:
        raise table.refuse("config_groups", "one group (projections of different formats are not supported)")
    scheme = groups.table(next(iter(groups)))
    if "output_activations" in scheme:
        raise scheme.refuse("output_activations", "absent (quantised outputs are not supported)")
    kind = table.text("format", scheme.text("format", "unnamed"))
    if kind == "naive-quantized":
        kind = "int-quantized" if scheme.table("weights").text("type", "int") == "int" else "float-quantized"
    reader = {"pack-quantized": _packed_int4, "int-quantized": _int8, "float-quantized": _float8}.get(kind)
    if reader is None:
        raise table.refuse("format", "pack-quantized, int-quantized or float-quantized")
    return reader(scheme)


def _packed_int4(scheme: Fields) -> Quantization:
    weights = scheme.table("weights")
    group = _group(weights)
    _bits(weights, 4)
    if weights.text("type", "int") != "int":
        raise weights.refuse("type", "int")
    _strategy(weights, group, "group", "channel")
    if scheme.table("input_activations"):
        raise scheme.refuse("input_activations", "absent (int4 weights need unquantised activations)")
    symmetric = weights.flag("symmetric", True)
    order = weights.one_of("actorder", _ORDERS)
    return Quantization(
        "compressed-tensors", "int4", group, symmetric=symmetric, act_order=_ORDERS.get(order, False) and group > 0
    )


def _int8(scheme: Fields) -> Quantization:
    weights = scheme.table("weights")
    if weights.text("type", "int") != "int":
        raise weights.refuse("type", "int")
    _bits(weights, 8)
    _strategy(weights, _group(weights), "channel", "tensor")
    if not weights.flag("symmetric", True):
        raise weights.refuse("symmetric", "true for int8")
    activations = scheme.table("input_activations")
    if activations and not (activations.flag("dynamic", False) and activations.flag("symmetric", True)):
        raise scheme.refuse("input_activations", "symmetric and dynamic (static scales are not supported)")
    _only(activations, "num_bits", activations.integer("num_bits", 1, 64, 8), 8)
    return Quantization("compressed-tensors", "int8", rounds_activations=bool(activations))


def _float8(scheme: Fields) -> Quantization:
    weights = scheme.table("weights")
    _bits(weights, 8)
    if _strategy(weights, _group(weights), "channel", "tensor", "block") != "block":
        return Quantization("compressed-tensors", "fp8")
    outputs, inputs = _blocks(weights, "block_structure")
    return Quantization("compressed-tensors", "fp8", group=inputs, block=outputs)


def _bits(weights: Fields, supported: int) -> None:
    _only(weights, "num_bits", weights.integer("num_bits", 1, 64), supported)


def _group(table: Fields) -> int:
    size = table.integer("group_size", -1, 2**20, -1)
    if (size > 0 and size % SINGLE_GROUP) or size == 0:
        raise table.refuse("group_size", f"a multiple of {SINGLE_GROUP}, or -1 for one scale per output")
    return max(size, 0)


def _only(table: Fields, key: str, bits: int, supported: int) -> None:
    if bits != supported:
        raise table.refuse(key, f"{supported} (other bit widths are not supported)")


def _strategy(weights: Fields, group: int, *supported: str) -> str:
    strategy = weights.text("strategy", "group" if group else "channel")
    if strategy not in supported:
        raise weights.refuse("strategy", " or ".join(supported))
    return strategy
