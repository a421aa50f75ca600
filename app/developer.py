"""Options for the development of localllm: environment variables LOCALLLM_DEV_<NAME>, never settings of a user."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

OF_THE_DAEMON = frozenset({"drain", "max_body_mib", "step_timeout"})  # the other options decide how a model is loaded


class Developer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All developer options, with their types, defaults and descriptions."""

    compiler: Annotated[
        Literal["inductor", "eager"],
        Meta(
            description="Compiler of graphs = split: inductor fuses kernels, eager skips compilation and starts faster."
        ),
    ] = "inductor"
    attention: Annotated[
        str,
        Meta(
            description="Attention implementation: auto, ours (built in), flashinfer (NVIDIA GPUs only), or ragged, "
            "pages or fused_v1 (NPUs only)."
        ),
    ] = "auto"
    lora_backend: Annotated[
        str,
        Meta(
            description="Kernels of LoRA adapters. auto: the fastest on this device; torch_native: products of torch, "
            "one adapter after the other; triton: Triton kernels, one request per tile; csgmv: Triton kernels, tiles "
            "that join the requests of an adapter; cpp: C++ kernels; ascend: grouped products. A device refuses other "
            "values."
        ),
    ] = "auto"
    self_test: Annotated[
        Literal["on", "off"],
        Meta(
            description="Test the kernels of a GPU or NPU once, at the first start (about 10 s). A kernel that fails "
            "is replaced by a slower implementation."
        ),
    ] = "on"
    streams: Annotated[
        Literal["one", "measured"],
        Meta(
            description="GPU streams of captured steps; measured: a second stream computes shared experts where this "
            "gains time."
        ),
    ] = "measured"
    weight_layout: Annotated[
        Literal["auto", "plain"],
        Meta(description="Layout of weights in memory; plain: no layout of the device's matrix units (NPUs only)."),
    ] = "auto"
    prefetch: Annotated[
        Literal["off", "on"],
        Meta(description="Load the weights of an MLP into the cache during attention (NPUs only, never measured)."),
    ] = "off"
    ops: Annotated[
        tuple[str, ...],
        Meta(
            description="Implementations of ops, e.g. norm=reference,linear.int4=triton: the name of an op, a family "
            "of ops or all, and the name of an implementation. localllm doctor --ops lists both."
        ),
    ] = ()
    drain: Annotated[
        float, Meta(ge=0, description="Seconds that running answers have to finish when the daemon stops.")
    ] = 5.0
    max_body_mib: Annotated[int, Meta(ge=1, description="Maximum size of a request body in MiB.")] = 16
    step_timeout: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds after which a step counts as hung, so that its model is restarted. 0: 120 on NVIDIA, "
            "600 on NPUs and for GGUF models on GPUs, 3600 on CPU, otherwise no limit.",
        ),
    ] = 0.0
