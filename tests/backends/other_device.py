"""The runner of a GPU's backend on the CPU, with the ops of the backend and under its name: the conformance suite, and
tiny models of every architecture. A subclass sets `backend`, `device` and its tier."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from localllm.backends.cpu.device import DEVICE as CPU
from localllm.backends.pytorch.device import Device
from localllm.backends.pytorch.opening import open_runner
from localllm.engine.files.model_files import read_model
from localllm.engine.options import Graphs, LoadOptions
from localllm.engine.runner import Runner
from localllm.kernels.ops import Ops
from localllm.kernels.ops.register import REFERENCES, KernelSet
from localllm.kernels.ops.streams import InOrder

from . import canary
from .conformance import BUDGET, Conformance
from .pages import SLOW_PAGES
from .tape import Tape
from .teacher import difference, expected
from .tiny import TINIES, Tiny

FREE = 2**30


def on_cpu(device: Device, kernels: tuple[KernelSet, ...]) -> Device:
    """`device` with the fastest of `kernels`, on torch's CPU device. Its graphs are tapes."""
    recorder = None if device.recorder is None else Tape
    cpu = replace(device, type="cpu", module=torch.cpu, pinned=False, meter=None, recorder=recorder, streams=InOrder)
    return replace(cpu, ops=kernels[0].ops, kernels=kernels)


class OnOtherDevice(Conformance):
    """The conformance suite, in float32: the canary's weights have this dtype."""

    device: Device
    same_bits = False

    @pytest.fixture(scope="class")
    @classmethod
    def runner(cls, tmp_path_factory: pytest.TempPathFactory) -> Runner:
        files = read_model(canary.save(tmp_path_factory.mktemp("canary")))
        return open_runner(files, replace(BUDGET, dtype="float32"), cls.device, FREE)


class TinyModels:
    """Models of every architecture, teacher-forced, against transformers."""

    backend: str
    device: Device
    graphs: tuple[Graphs, ...] = ("off",)

    def errors(
        self, device: Device, folder: Path, shape: Tiny, logits: list[Tensor], graphs: Graphs, dtype: str
    ) -> Tensor:
        """Absolute errors of the log-probabilities."""
        options = LoadOptions(
            context=shape.context,
            cache_bytes=2**25,
            max_rows=4,
            max_step_tokens=64,
            threads=1,
            dtype=dtype,
            graphs=graphs,
        )
        return difference(open_runner(read_model(folder), options, device, FREE), shape, logits)[0].abs()

    @pytest.mark.parametrize("shape", [*TINIES, *SLOW_PAGES], ids=str)
    def test_float32_equals_transformers(self, shape: Tiny, tmp_path: Path) -> None:
        logits = expected(shape, tmp_path)
        for graphs in self.graphs:
            assert self.errors(self.device, tmp_path, shape, logits, graphs, "float32").max() < 1e-3, graphs

    @pytest.mark.parametrize("shape", TINIES[::9], ids=lambda shape: shape.label)
    def test_bfloat16_is_as_near_to_transformers_as_the_references(self, shape: Tiny, tmp_path: Path) -> None:
        """The mean error. The largest one is that of an expert whose score is nearly that of another. Some of the
        architectures: a CPU computes bfloat16 slowly."""
        logits = expected(shape, tmp_path, torch.bfloat16)
        references = replace(CPU, ops=Ops(), kernels=(REFERENCES,), recorder=Tape)
        usual = self.errors(references, tmp_path, shape, logits, "off", "bfloat16").mean()
        actual = self.errors(self.device, tmp_path, shape, logits, "off", "bfloat16").mean()
        assert actual < 1.5 * usual + 1e-3
