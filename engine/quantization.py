"""config.json's quantization_config -> Quantization: how a checkpoint's projections were made smaller by others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .errors import ModelRefused
from .fields import Fields

Quant = Literal["none", "int8", "int4", "fp8"]  # what we make of ordinary weights while loading
Method = Literal["gptq", "awq", "compressed-tensors", "fp8", "foreign"]

SINGLE_GROUP = 32  # groups of inputs are a multiple of this


@dataclass(frozen=True, slots=True)
class Quantization:
    """A checkpoint's weight format. Which projections have it, their stored tensors say."""

    method: Method
    format: Literal["int4", "int8", "fp8", "foreign"]  # foreign: only the library that wrote it reads it
    group: int = 0  # inputs that share a scale; 0: all of an output's
    block: int = 0  # outputs that share a scale, where a scale is for a block; 0: each has its own, or all one
    symmetric: bool = True  # no zero points are stored
    zero_offset: int = 0  # to be added to stored zero points
    rounds_activations: bool = False  # made for activations of the same width

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.method} {self.format}" if self.method != self.format else self.format


def parse_quantization(fields: Fields, where: str = "config.json") -> Quantization | None:
    """None where config.json names no quantisation. Raises ModelRefused for what cannot be loaded, by name."""
    if "quantization" in fields and "bits" in fields.table("quantization"):
        return Quantization("foreign", "foreign")  # quantization_config, where it is there too, says the same
    for key in ("quantization_config", "compression_config"):
        if key in fields:
            table = fields.table(key)
            method = table.text("quant_method", "compressed-tensors" if "config_groups" in table else "unnamed")
            reader = {"gptq": _gptq, "awq": _awq, "fp8": _fp8, "compressed-tensors": _compressed}.get(method)
            if reader is None:
                raise ModelRefused(
                    f"{where}: weights quantised by {method:.50} are not supported",
                    "supported are gptq, awq, compressed-tensors and fp8; or use a bf16 model",
                )
            return reader(table)
    return None


def _gptq(table: Fields) -> Quantization:
    _only(table, "bits", table.integer("bits", 0, 64), 4)
    version = table.text("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise table.refuse("checkpoint_format", "gptq or gptq_v2")
    if "dynamic" in table and table.table("dynamic"):
        raise table.refuse("dynamic", "empty: projections of different formats are not supported")
    return Quantization("gptq", "int4", _group(table), symmetric=False, zero_offset=1 if version == "gptq" else 0)


def _awq(table: Fields) -> Quantization:
    _only(table, "bits", table.integer("bits", 0, 64), 4)
    if table.text("version", "gemm").lower() != "gemm":
        raise table.refuse("version", "gemm")
    return Quantization("awq", "int4", _group(table), symmetric=not table.flag("zero_point", True))


def _fp8(table: Fields) -> Quantization:
    if table.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise table.refuse("fmt", "e4m3")
    if "weight_block_size" not in table:
        return Quantization("fp8", "fp8")
    outs, ins = (int(size) for size in table.numbers("weight_block_size", 2))
    if ins % SINGLE_GROUP:
        raise table.refuse("weight_block_size", f"blocks of a multiple of {SINGLE_GROUP} inputs")
    return Quantization("fp8", "fp8", ins, outs)


def _compressed(table: Fields) -> Quantization:
    """compressed-tensors, as llm-compressor writes it."""
    status = table.text("quantization_status", "compressed")
    if status != "compressed":
        raise table.refuse("quantization_status", "compressed")
    if "sparsity_config" in table and table.table("sparsity_config").text("format", "dense") != "dense":
        raise table.refuse("sparsity_config", "dense")
    if "kv_cache_scheme" in table:
        raise table.refuse("kv_cache_scheme", "nothing: a smaller KV cache is not supported")
    groups = table.table("config_groups")
    if len(groups) != 1:
        raise table.refuse("config_groups", "one group: projections of different formats are not supported")
    scheme = groups.table(next(iter(groups)))
    weights, kind = scheme.table("weights"), table.text("format", scheme.text("format", "unnamed"))
    bits, group = weights.integer("num_bits", 1, 64), _group(weights)
    strategy = weights.text("strategy", "group" if group else "channel")
    activations = scheme.table("input_activations")
    if kind == "pack-quantized":
        _only(weights, "num_bits", bits, 4)
        _strategy(weights, strategy, "group", "channel")
        if activations:
            raise scheme.refuse("input_activations", "nothing: int4 weights are taken with activations as they are")
        return Quantization("compressed-tensors", "int4", group, symmetric=weights.flag("symmetric", True))
    if kind in ("int-quantized", "naive-quantized") and weights.text("type", "int") == "int":
        _only(weights, "num_bits", bits, 8)
        _strategy(weights, strategy, "channel", "tensor")
        if not weights.flag("symmetric", True):
            raise weights.refuse("symmetric", "true for int8")
        if activations and not (activations.flag("dynamic", False) and activations.flag("symmetric", True)):
            raise scheme.refuse("input_activations", "symmetric and dynamic: fixed scales are not supported")
        return Quantization("compressed-tensors", "int8", rounds_activations=bool(activations))
    if kind in ("float-quantized", "naive-quantized"):
        _only(weights, "num_bits", bits, 8)
        _strategy(weights, strategy, "channel", "tensor", "block")
        if strategy != "block":
            return Quantization("compressed-tensors", "fp8")
        outs, ins = (int(size) for size in weights.numbers("block_structure", 2))
        return Quantization("compressed-tensors", "fp8", ins, outs)
    raise table.refuse("format", "pack-quantized, int-quantized or float-quantized")


def _group(table: Fields) -> int:
    size = table.integer("group_size", -1, 2**20, -1)
    if (size > 0 and size % SINGLE_GROUP) or size == 0:
        raise table.refuse("group_size", f"a multiple of {SINGLE_GROUP}, or -1 for one scale for each output")
    return max(size, 0)


def _only(table: Fields, key: str, found: int, supported: int) -> None:
    if found != supported:
        raise table.refuse(key, f"{supported}; other numbers of bits are not supported")


def _strategy(table: Fields, found: str, *supported: str) -> None:
    if found not in supported:
        raise table.refuse("strategy", " or ".join(supported))
