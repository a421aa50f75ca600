"""The ops of the NPU."""

from __future__ import annotations

from ...kernels.ops import Ops
from .attention import ATTENTION
from .cache import WRITES
from .elementwise import ACTIVATION, NORM, ROPE

OPS = Ops(norm=NORM, activation=ACTIVATION, rope=ROPE, kv=WRITES, attention=ATTENTION)
