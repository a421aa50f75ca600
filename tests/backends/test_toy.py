"""Backends that docs/develop/add-a-backend.md describes: a folder, and a name in ORDER; nothing else changes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm import backends
from localllm.app import doctor
from localllm.app.config import Settings
from localllm.app.daemon.loading import load_frame
from localllm.app.store.local.refs import ModelRef
from localllm.app.worker.opening import open_model
from localllm.backends import platforms
from localllm.engine.files.model_files import read_model
from localllm.engine.options import LoadOptions
from localllm.engine.runner import CacheGroup, RunnerSpec

from ..app.tiny_qwen import write_model
from ..engine.token_device import TokenDevice
from . import canary
from .conformance import Conformance, Conversation

SPEC = RunnerSpec(vocab_size=97, max_tokens=16, max_rows=4, max_context=64, groups=(CacheGroup(4, 64),))
TORCH = {
    "__init__.py": """
from ...engine.runner import DeviceInfo
from ..pytorch.models import accepts

name = "toy"


def probe():
    return DeviceInfo(name, "Toy 3000", 2**34, 2**33, {"wheels": "4"})


def open(files, options):
    from ..pytorch.opening import open_runner
    from .device import DEVICE

    return open_runner(files, options, DEVICE, 2**30)


def read_bandwidth():
    return 1e9
""",
    "device.py": """
import torch

from ...kernels.ops import Ops
from ..pytorch.device import Device

OPS = Ops()
DEVICE = Device("toy", "cpu", torch.cpu, OPS, dtype=torch.float32)
""",
}
OTHER = {
    "__init__.py": """
from ...engine.runner import DeviceInfo

name = "abacus"


def probe():
    return DeviceInfo(name, "Beads", 100, 50)


def accepts(files):
    return ""


def open(files, options):
    from tests.backends.test_toy import SPEC, TokenDevice

    return TokenDevice(SPEC)


def read_bandwidth():
    return None
""",
}


def added(folder: Path, patch: pytest.MonkeyPatch, name: str, files: dict[str, str]) -> None:
    """Adds the folder of a backend and its name in ORDER."""
    (folder / name).mkdir(parents=True)
    for file, text in files.items():
        (folder / name / file).write_text(text)
    patch.setattr(backends, "__path__", [*backends.__path__, str(folder)])
    patch.setattr(backends, "ORDER", (name, *backends.ORDER))
    patch.setattr(platforms, "ORDER", backends.ORDER)


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as context:
        yield context
    toys = "localllm.backends.toy", "localllm.backends.abacus"
    for module in [name for name in sys.modules if name.startswith(toys)]:
        del sys.modules[module]


@pytest.fixture(scope="module", autouse=True)
def _toy(tmp_path_factory: pytest.TempPathFactory, patch: pytest.MonkeyPatch) -> None:
    added(tmp_path_factory.mktemp("toy"), patch, "toy", TORCH)


class TestToy(Conformance):
    backend = "toy"
    same_bits = False  # torch's products


def test_toy_backend_is_chosen_and_shown() -> None:
    assert backends.choose().info.name == "Toy 3000"
    report = doctor.examine("toy")
    assert (report.choice, report.backends[0].says) == ("toy", "Toy 3000")
    ops = doctor.examine_ops(()).ops
    assert set(ops["norm.rms"]) >= {"toy", "cpu"}
    assert ops["norm.rms"]["toy"] == "reference"


def test_worker_opens_a_model_on_the_toy_backend(tmp_path: Path) -> None:
    folder = write_model(tmp_path, context=64)
    frame = load_frame(ModelRef("tiny", folder), Settings(backend="toy", cache_mib=1, max_rows=2))
    model = open_model(frame, lambda *_: None)
    assert (model.info.backend, model.info.device) == ("toy", "Toy 3000")
    model.close()
    model.runner.close()


def test_backend_without_torch_runs(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    added(tmp_path, patch, "abacus", OTHER)
    files = read_model(canary.save(tmp_path))
    choice = backends.choose("abacus", files)
    assert doctor.examine("abacus").choice == "abacus"
    assert "abacus" in doctor.examine_ops(()).without

    runners = choice.backend.open(files, LoadOptions()), TokenDevice(SPEC)
    result, expected = map(Conversation, runners)
    for talk in (result, expected):
        talk.submit("a", range(3), 4)
    assert result.finish() == expected.finish()
    assert len(result.tokens["a"]) == 4
