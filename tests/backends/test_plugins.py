"""Plug-ins: installed packages whose entry points `localllm.ops` implement ops of a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.app.doctor import examine_ops
from localllm.backends.cpu.device import DEVICE
from localllm.backends.pytorch.opening import open_runner
from localllm.backends.pytorch.plugins import plugins
from localllm.backends.pytorch.runner import TorchRunner
from localllm.engine.errors import SettingRefused
from localllm.engine.files.model_files import read_model
from localllm.engine.options import LoadOptions

from . import canary
from .conformance import Conversation

RIGHT = """
from localllm.kernels.ops.norm import add_rms_norm as reference
from localllm.kernels.ops.register import Implementation

calls = []

def add_rms_norm(x, residual, weight, eps, offset=0.0):
    calls.append(x.shape)
    return reference(x, residual, weight, eps, offset)

OPS = [Implementation("norm.add_rms", "cpu", add_rms_norm)]
"""
OPTIONS = LoadOptions(cache_bytes=2**22, max_rows=2)


def install(folder: Path, name: str, source: str) -> None:
    """A package as pip installs it: a module, and its metadata."""
    (folder / f"{name}_ops.py").write_text(source, "utf-8")
    metadata = folder / f"{name}_ops-1.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-ops\nVersion: 1.5\n", "utf-8")
    (metadata / "entry_points.txt").write_text(f"[localllm.ops]\n{name} = {name}_ops:OPS\n", "utf-8")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    plugins.cache_clear()
    yield folder
    plugins.cache_clear()
    for name in [name for name in sys.modules if name.endswith("_ops") and "." not in name]:
        del sys.modules[name]


def opened(folder: Path, options: LoadOptions = OPTIONS) -> TorchRunner:
    runner = open_runner(read_model(canary.save(folder)), options, DEVICE, 2**30)
    assert isinstance(runner, TorchRunner)
    return runner


def test_plugin_computes_its_op(site: Path, tmp_path: Path) -> None:
    install(site, "acme", RIGHT)
    runner = opened(tmp_path)
    module = sys.modules["acme_ops"]
    assert runner.device.ops.norm.add_rms is module.add_rms_norm, "the runner has the function itself"
    assert runner.spec.warnings == DEVICE.warnings
    module.calls.clear()
    talk = Conversation(runner)
    talk.submit("a", canary.prompt(0, 25, seed=1), 4)
    assert talk.finish() == {"a": canary.walk(canary.prompt(0, 25, seed=1), 4)}
    assert module.calls, "no fused op computes the norms of the layers"


def test_choice_by_name_replaces_a_plugin(site: Path, tmp_path: Path) -> None:
    install(site, "acme", RIGHT)
    ops = {choice: opened(tmp_path, LoadOptions(cache_bytes=2**22, ops=(choice,))).device.ops for choice in CHOICES}
    assert ops["norm=acme"].norm.add_rms is sys.modules["acme_ops"].add_rms_norm
    assert ops["norm=reference"].norm.add_rms.__module__ == "localllm.kernels.ops.norm"
    with pytest.raises(SettingRefused, match=r"norm\.rms has no implementation 'acme'"):
        opened(tmp_path, LoadOptions(cache_bytes=2**22, ops=("norm.rms=acme",)))


CHOICES = ("norm=acme", "norm=reference")
CHANGES = {
    "raise OSError('no library')\n" + RIGHT: "cannot be loaded: OSError: no library",
    RIGHT.replace("OPS =", "OTHERS ="): "cannot be loaded: AttributeError",
    RIGHT.replace('"norm.add_rms"', '"norm.add"'): "norm.add: localllm has no such op",
    RIGHT.replace("offset=0.0)", "shift=0.0)"): "norm.add_rms: the parameters of add_rms_norm are not those of the",
    RIGHT.replace("Implementation(", "("): "is no Implementation",
    RIGHT.replace(", add_rms_norm)", ", 3)"): "norm.add_rms: 3 is no Python function",
    RIGHT.replace(
        ", add_rms_norm)", ", add_rms_norm, (9, 0))"
    ): "norm.add_rms is not used: it needs capability 9.0, and this device has no such number",
    RIGHT.replace("weight, eps, offset)\n", "2 * weight, eps, offset)\n"): "norm.add_rms is not used: it is off by",
    RIGHT.replace(
        "return reference", "raise RuntimeError('no GPU')\n    reference"
    ): "norm.add_rms is not used: it fails: RuntimeError: no GPU",
}


@pytest.mark.parametrize("source", CHANGES, ids=CHANGES.values())
def test_wrong_plugin_is_a_warning(source: str, site: Path, tmp_path: Path) -> None:
    install(site, "acme", source)
    runner = opened(tmp_path)
    assert runner.device.ops == DEVICE.ops
    (warning,) = set(runner.spec.warnings) - set(DEVICE.warnings)
    assert warning.startswith("plug-in acme: ")
    assert CHANGES[source] in warning


def test_first_of_two_plugins_is_used(site: Path, tmp_path: Path) -> None:
    install(site, "zeta", RIGHT)
    install(site, "acme", RIGHT)
    install(site, "cpp", RIGHT)
    runner = opened(tmp_path)
    assert runner.device.ops.norm.add_rms is sys.modules["acme_ops"].add_rms_norm
    used, cpp = set(runner.spec.warnings) - set(DEVICE.warnings)
    if "zeta" not in used:
        used, cpp = cpp, used
    assert used.startswith("plug-in zeta: norm.add_rms is not used: it is replaced by another plug-in")
    assert cpp == "plug-in cpp: norm.add_rms is not used: it has the name of kernels of cpu"


def test_wrong_op_of_a_plugin_leaves_its_other_ops(site: Path, tmp_path: Path) -> None:
    """No fused op of the device computes the norms then."""
    source = RIGHT.replace(
        "OPS = [",
        """def rms_norm(x, weight, eps, offset=0.0):
    return x

OPS = [Implementation("norm.rms", "cpu", rms_norm), """,
    )
    install(site, "acme", source)
    ops = opened(tmp_path).device.ops
    assert ops.norm.add_rms is sys.modules["acme_ops"].add_rms_norm
    assert ops.norm.rms is DEVICE.ops.norm.rms
    assert ops.layer.decoder.__module__ == "localllm.kernels.ops.layer"


def test_doctor_lists_plugins(site: Path) -> None:
    install(site, "acme", RIGHT)
    install(site, "broken", "raise OSError('no library')")
    done = subprocess.run(
        [sys.executable, "-m", "localllm.app.cli", "doctor", "--ops"],
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "Plug-in acme (acme-ops 1.5)" in done.stdout
    assert "Plug-in broken (broken-ops 1.5)\n  not used        cannot be loaded: OSError: no library" in done.stdout
    report = examine_ops(())
    assert report.ops["norm.add_rms"]["cpu"] == "acme"
    assert report.ops["norm.rms"]["cpu"] != "acme"
    assert json.dumps(report.plugins["acme (acme-ops 1.5)"]) == "[]"
