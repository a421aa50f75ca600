"""The report of `localllm doctor`. Only the folders of the backends name devices."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from localllm import backends
from localllm.app import doctor
from localllm.app.client import LoadedModel
from localllm.app.commands.doctor import label
from localllm.app.doctor import PACKAGES
from localllm.app.errors import ConfigError, ModelNotFound, NoBackend
from localllm.backends.platforms import platforms
from localllm.engine.runner import Unavailable
from localllm.kernels.ops import Ops

PLATFORMS = platforms()
ROOT = Path(__file__).resolve().parents[2]


def test_every_backend_is_listed_in_order_with_a_reason() -> None:
    report = doctor.examine()
    assert [status.backend for status in report.backends] == list(backends.ORDER)
    assert all(status.says for status in report.backends)
    assert all(not status.says.endswith(".") for status in report.backends)
    assert report.choice == backends.choose().backend.name
    assert report.choice in {status.backend for status in report.backends if status.available}
    assert report.choice in report.reason
    json.dumps(report.for_json())


def test_unavailable_backend_is_reported_not_raised() -> None:
    report = doctor.examine("no-such-backend")
    assert report.choice == ""
    assert "no-such-backend" in report.reason


def test_loaded_model_is_shown_with_its_warnings() -> None:
    model = LoadedModel(id="guide", state="ready", pid=1)
    assert label(model) == "guide"
    better = msgspec.structs.replace(model, quant="int8", warnings=("no memory to capture",))
    assert label(better) == "guide (int8; no memory to capture)"


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "localllm.app.cli", "doctor", *args]
    return subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=100)


def test_text_and_json_agree() -> None:
    text, as_json = run(), json.loads(run("--json").stdout)
    assert text.returncode == 0, text.stderr
    for status in as_json["backends"]:
        assert status["says"].partition(",")[0] in text.stdout
    assert as_json["daemon"] == "not running"
    assert as_json["choice"] in text.stdout


def test_doctor_with_a_selected_backend() -> None:
    assert json.loads(run("--json", "--backend", "cpu").stdout)["reason"] == "cpu was requested"
    missing = next(status.backend for status in doctor.examine().backends if not status.available)
    done = run("--backend", missing)
    assert done.returncode == NoBackend.exit_code
    assert f"backend {missing} is unavailable" in done.stdout


def test_ops_by_platform() -> None:
    text, as_json = run("--ops"), json.loads(run("--ops", "--json").stdout)
    assert text.returncode == 0, text.stderr
    assert set(as_json["ops"]) == {name for name, _ in Ops()}
    for op, row in as_json["ops"].items():
        assert [op, *row.values()] in [line.split() for line in text.stdout.splitlines()]
    assert {*as_json["ops"]["norm.rms"], *as_json["without"]} == {*backends.ORDER, "native"}


def test_ops_table_has_the_sets_of_kernels() -> None:
    report = json.loads(run("--ops", "--json").stdout)
    sets = {(one["platform"], one["name"]): one for one in report["kernels"]}
    assert sets["npu", "torch_npu"]["ops"] == [row["npu"] for row in report["ops"].values()].count("torch_npu")
    assert ("cuda", "triton") not in sets or sets["cuda", "triton"]["capability"] == "8.0"
    assert report["plugins"] == report["refused"] == {}


def test_ops_table_shows_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_DEV_OPS", "norm.rms=reference,sampling=reference")
    as_json = json.loads(run("--ops", "--json").stdout)
    native = dict.fromkeys(PLATFORMS, "reference")
    assert as_json["ops"]["norm.rms"].items() >= native.items()
    assert as_json["ops"]["sampling.draw"].items() >= native.items()
    assert as_json["choices"] == ["norm.rms=reference", "sampling=reference"]
    assert "norm.rms=reference, sampling=reference" in run().stdout
    monkeypatch.setenv("LOCALLLM_DEV_OPS", "norm=torch_npu")
    text, as_json = run("--ops").stdout, json.loads(run("--ops", "--json").stdout)
    reason = "ops: norm has no implementation 'torch_npu' (implementations on this device: "
    assert as_json["refused"]["cpu"].startswith(reason)
    assert reason in text
    assert "npu" not in as_json["refused"]


@pytest.mark.parametrize(
    ("choice", "reason", "hint"),
    [
        ("norm.rmss=reference", "unknown op 'norm.rmss'", "did you mean norm.rms?"),
        ("norm.rms=tritn", "norm.rms has no implementation 'tritn'", "implementations on this device: "),
    ],
)
def test_wrong_choice_of_an_op_is_refused(monkeypatch: pytest.MonkeyPatch, choice: str, reason: str, hint: str) -> None:
    monkeypatch.setenv("LOCALLLM_DEV_OPS", choice)
    refused = run("--ops")
    assert refused.returncode == ConfigError.exit_code
    assert reason in refused.stderr
    assert hint in refused.stderr


def test_trace_shows_the_ops_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_DEV_OPS", "norm=reference")
    done = run("--ops", "--trace", "guide", "--backend", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["model"], report["backend"]) == ("guide", "cpu")
    norms = [call for call in report["calls"] if call["op"] == "norm.add_rms"]
    assert {call["implementation"] for call in norms} == {"reference"}
    assert all(call["calls"] > 0 and "x" in call["inputs"] and call["output"] for call in norms)
    assert {"linear.dense", "attention.paged", "sampling.draw"} <= {call["op"] for call in report["calls"]}


def test_trace_of_no_torch_model_is_refused(tmp_path: Path) -> None:
    missing = run("--trace", str(tmp_path))
    assert missing.returncode == ModelNotFound.exit_code
    if isinstance(backends.load("mlx").probe(), Unavailable):
        pytest.skip("there is no MLX")
    refused = run("--trace", "guide", "--backend", "mlx")
    assert refused.returncode == NoBackend.exit_code
    assert "mlx runs this model, and only torch backends have ops" in refused.stderr


DEVICE_WORDS = {*backends.ORDER, "gpu", "rocm", "ascend", "metal", "amx", "avx512", "nvidia", "amd", "intel", "apple"}
LIBRARY_WORDS = set(
    "torch torch_npu triton flashinfer mlx_lm mlx-lm llama_cpp llama-cpp-python cublas cudnn opencl vulkan".split()
)


def code_words(file: Path) -> set[str]:
    """The identifiers and the one-word string constants of a module, without docstrings and sentences."""
    names: set[str] = set()
    texts: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        match node:
            case ast.Constant(value=str(word)):
                texts.add(word.lower())
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.arg(arg=word):
                names.add(word.lower())
            case ast.FunctionDef(name=word) | ast.ClassDef(name=word) | ast.alias(name=word):
                names.add(word.lower())
    return texts | names - {"cpu"}  # may also stand for processor time


@pytest.mark.parametrize("folder", ["app", "engine"])
def test_app_and_engine_name_no_device(folder: str) -> None:
    """The differences between devices are in backends/: app and engine know no device, and no library of one. The
    table of versions that doctor prints is the exception."""
    named: dict[str, set[str]] = {}
    for file in (ROOT / folder).rglob("*.py"):
        words = code_words(file) & (DEVICE_WORDS | LIBRARY_WORDS)
        if file == ROOT / "app/doctor.py":
            words -= set(PACKAGES)
        if words:
            named[str(file.relative_to(ROOT))] = words
    assert named == {}
