"""Chooses the attention implementation: built-in, or third-party if the load options name one."""

from __future__ import annotations

from dataclasses import replace

from ...engine.errors import SettingRefused
from ...engine.options import LoadOptions
from .device import Device


def with_attention(device: Device, options: LoadOptions) -> Device:
    """`device` with the attention named by `options`. Raises SettingRefused if the device has no such attention."""
    name = options.attention
    if name in ("auto", "ours"):
        return device
    if name not in device.attentions:
        raise SettingRefused(f"attention {name} is not supported on {device.name}", "set it to auto")
    if options.graphs == "full":
        raise SettingRefused(
            f"attention {name} plans each step on the host, so graphs = full cannot capture it",
            "set graphs to breakable or off, or attention to auto",
        )
    return replace(device, ops=device.attentions[name](device.ops), captures_attention=False)
