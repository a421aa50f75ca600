"""Options for loading a model: one record, passed from the settings through the worker to the runner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .errors import SettingRefused
from .files.quantization import Quant

# fp8: of GPUs. The others are the formats of llama.cpp's KV cache.
CacheDtype = Literal["auto", "fp8", "int8", "f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
# shared: one cache, in which rows share the pages of a common prefix. rows: each row has a cache for a whole context.
CacheLayout = Literal["shared", "rows"]
# Which steps are captured as graphs. full: decode steps. breakable: also prefill steps, without their attention. split:
# as breakable, and the prefill segments are compiled. off: no steps. auto: the device's default.
Graphs = Literal["auto", "full", "split", "breakable", "off"]
# RoPE scaling of llama.cpp. auto: that of the model's file.
RopeScaling = Literal["auto", "none", "linear", "yarn"]
Compiler = Literal["inductor", "eager"]
Streams = Literal["one", "measured"]
WeightLayout = Literal["auto", "plain"]  # plain: rows of the matrix in order, also where another layout is faster
Prefetch = Literal["off", "on"]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options for one loaded model. A backend raises SettingRefused for an option that it does not support."""

    context: int | None = None  # maximum positions of one sequence; None: the model's limit, if the memory suffices
    cache_bytes: int | None = None  # bytes of the KV cache; None: computed from the free memory
    max_rows: int = 64
    max_step_tokens: int | None = None  # maximum number of tokens in one step; None: the device's default
    page_size: int | None = None  # tokens per page of the KV cache; None: the device's default
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    cache_dtype: CacheDtype = "auto"  # dtype of the KV cache; auto: the dtype of activations, for llama.cpp f16
    cache_layout: CacheLayout = "shared"  # of llama.cpp's KV cache
    quant: Quant = "none"  # format that the weights are quantised to while they are loaded
    packed_dir: Path | None = None  # folder that caches quantised weights; None: not cached
    graphs: Graphs = "auto"
    compiler: Compiler = "inductor"  # compiles the segments of graphs=split
    compiled_dir: Path | None = None  # folder that caches compiled segments; None: torch's default folder
    threads: int | None = None  # number of CPU threads; None: the number of physical cores
    gpu_layers: int | None = None  # number of layers that llama.cpp computes on GPUs; None: as many as fit
    rope_scaling: RopeScaling = "auto"  # of llama.cpp
    rope_scale: float | None = None  # factor by which RoPE scaling extends the trained context; None: the model's own
    rope_base: float | None = None  # base of RoPE's frequencies; None: the model's own
    ops: tuple[str, ...] = ()  # "name=implementation" of ops, op families or "all", for developers
    # Streams of captured steps. measured: a second stream computes shared experts where it gains time.
    streams: Streams = "measured"
    weight_layout: WeightLayout = "auto"
    prefetch: Prefetch = "off"  # on: the weights of an MLP are loaded into the cache of the device during attention
    adapter_slots: int = 8  # maximum number of adapters in one step
    adapter_rank: int = 16  # maximum rank of an adapter
    lora_backend: str = "auto"  # implementation of LoRA products; the device lists those that it supports
    attention: str = "auto"  # "ours" (built in), or an implementation that the device lists
    self_test_dir: Path | None = None  # folder with the results of the kernels' self-test; None: no self-test


# Options of llama.cpp alone -> the values that other backends support.
NOT_GGUF: Mapping[str, Sequence[object]] = {
    "cache_layout": ("shared",),
    "gpu_layers": (None,),
    "rope_scaling": ("auto",),
    "rope_scale": (None,),
    "rope_base": (None,),
}

# Options of few devices -> the values that the other ones support.
RARE: Mapping[str, Sequence[object]] = {"weight_layout": ("auto",), "prefetch": ("off",)}


def check_supported(options: LoadOptions, supported: Mapping[str, Sequence[object]], backend: str) -> None:
    """Raises SettingRefused for an option whose value is not in `supported`: option -> its values."""
    for name, values in supported.items():
        value = getattr(options, name)
        if value in values:
            continue
        if name in NOT_GGUF:
            hint = f"leave out {name}: only GGUF models have it"
        else:
            hint = f"set {name} to {values[0]}" if values[0] else f"leave {name} empty"
        raise SettingRefused(f"{name} {_text(value)} is not supported by {backend}", hint, setting=name)


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
