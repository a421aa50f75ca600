"""Attention of another's making, where a device offers it and a setting asks for it."""

from __future__ import annotations

from dataclasses import replace

from ...engine.errors import SettingRefused
from ...engine.options import LoadOptions
from .device import Device


def with_attention(device: Device, options: LoadOptions) -> Device:
    """The device with the attention that the options name. Raises SettingRefused where it has no such."""
    name = options.attention
    if name in ("auto", "ours"):
        return device
    if name not in device.attentions:
        raise SettingRefused(f"attention {name} is not for {device.name}", "leave it at auto")
    if options.graphs == "full":
        raise SettingRefused(
            f"attention {name} plans each step on the host, which graphs full records",
            "choose graphs breakable or off, or leave attention at auto",
        )
    return replace(device, ops=device.attentions[name](device.ops), records_attention=False)
