"""What a worker is told to load: the settings, and what a request asks for itself."""

from __future__ import annotations

from pathlib import Path

from localllm.app import paths
from localllm.app.config import Settings
from localllm.app.daemon.host import load_frame
from localllm.app.store.catalog import ModelRef

REF = ModelRef("some/model", Path("/models/some"))


def test_settings_are_handed_on() -> None:
    frame = load_frame(REF, Settings(attention="flashinfer", quant="int8", backend="cpu"), None, None)
    assert (frame.model, frame.path) == ("some/model", "/models/some")
    assert (frame.attention, frame.quant, frame.backend) == ("flashinfer", "int8", "cpu")


def test_a_request_comes_before_the_settings() -> None:
    frame = load_frame(REF, Settings(quant="int8", backend="cpu"), "mlx", "int4")
    assert (frame.quant, frame.backend) == ("int4", "mlx")


def test_kernels_are_tested_where_that_is_set() -> None:
    assert load_frame(REF, Settings(), None, None).self_test_dir == str(paths.self_test_dir())
    assert load_frame(REF, Settings(self_test="off"), None, None).self_test_dir == ""
