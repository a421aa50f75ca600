"""The MLX backend on MLX's own CPU device: the same library that computes on Apple's GPUs, run elsewhere."""

from __future__ import annotations

import pytest

pytest.importorskip("mlx_lm", reason="mlx and mlx-lm are not installed")

from .conformance import Conformance


@pytest.mark.real_otherdevice
class TestMlx(Conformance):
    backend = "mlx"
