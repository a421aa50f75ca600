"""The ops of the NPU."""

from __future__ import annotations

from ...kernels.ops import Ops
from .attention import ATTENTION
from .cache import WRITES
from .elementwise import ACTIVATION, NORM, ROPE
from .experts import moe
from .formats import WeightFormats
from .lora import LORA
from .products import linear


def npu_ops(formats: WeightFormats) -> Ops:
    """The ops of one model, whose weights `formats` lays out."""
    return Ops(
        norm=NORM,
        activation=ACTIVATION,
        rope=ROPE,
        linear=linear(formats),
        moe=moe(formats),
        lora=LORA,
        kv=WRITES,
        attention=ATTENTION,
    )


OPS = npu_ops(WeightFormats())
