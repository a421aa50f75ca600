"""Chooses the attention and the LoRA products that the load options name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ...engine.errors import SettingRefused
from ...engine.options import LoadOptions
from ...kernels.ops import Ops
from ...kernels.ops.lora import Lora
from ...kernels.ops.register import REFERENCE, KernelSet
from .device import Device

# Set of kernels -> the values of LoadOptions.lora_backend that select its LoRA products.
_LORA_NAMES = {"cpp": ("cpp",), "triton": ("triton", "csgmv"), "torch_npu": ("ascend",), REFERENCE: ("torch_native",)}


def lora_backends(kernels: Sequence[KernelSet]) -> Mapping[str, Lora]:
    """Device.lora_backends of a device with these sets of kernels."""
    with_lora = [kernel_set for kernel_set in kernels if kernel_set.serves("lora.add")]
    return MappingProxyType({name: one.ops.lora for one in with_lora for name in _LORA_NAMES.get(one.name, ())})


def with_attention(device: Device, options: LoadOptions) -> Device:
    """`device` with the attention named by `options`. Raises SettingRefused if the device has no such attention."""
    name = options.attention
    if name in ("auto", "ours"):
        return device
    if name not in device.attentions:
        raise SettingRefused(
            f"attention {name} is not supported on {device.name}", "set attention to auto", setting="attention"
        )
    device = device.attentions[name](device)
    if options.graphs == "full" and not device.captures_attention:
        raise SettingRefused(
            f"attention {name} plans each step on the host, so graphs = full cannot capture it",
            "set graphs to breakable or off, or attention to auto",
            setting="graphs",
        )
    return device


def with_lora_backend(device: Device, options: LoadOptions) -> Device:
    """`device` with the LoRA products named by `options`. Raises SettingRefused if the device does not support them.

    With "auto" the device's ops choose the fastest implementation of each shape. Except with "triton", tiles join the
    requests of an adapter: they are never more than tiles of one request each, so the kernels read the factors less
    often or as often.
    """
    name = options.lora_backend
    if name == "auto":
        return device
    lora = device.lora_backends.get(name)
    if lora is None:
        supported = ", ".join(("auto", *device.lora_backends))
        message = f"lora_backend {name} is not supported on {device.name}"
        raise SettingRefused(message, f"set it to one of {supported}", setting="lora_backend")
    if name == "torch_native":
        return replace(device, ops=device.ops.with_ops_of(Ops(), ["lora"]))
    return replace(device, ops=replace(device.ops, lora=lora), joins_requests=name != "triton")
