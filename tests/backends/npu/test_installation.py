"""The probe of NPUs: each missing requirement is named with its remedy."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.backends import BackendUnavailable, npu
from localllm.backends.npu import installation
from localllm.backends.npu.driver import Npu, cann_version
from localllm.engine.runner import DeviceInfo, Unavailable

VERSIONS = {"torch": "2.13.0+cpu", "torch_npu": "2.13.0"}


@pytest.fixture
def versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The installed packages of a machine with a driver and two NPUs: package -> version."""
    for node in ("davinci_manager", "davinci0", "davinci1"):
        (tmp_path / node).touch()
    installed = dict(VERSIONS)
    monkeypatch.setattr(installation, "DEVICES", tmp_path)
    monkeypatch.setattr(installation, "package_version", lambda name: installed.get(name, ""))
    return installed


def reason() -> str:
    answer = npu.probe()
    assert isinstance(answer, Unavailable)
    return answer.reason


@pytest.mark.usefixtures("versions")
def test_the_driver_and_its_nodes_are_required(tmp_path: Path) -> None:
    for node in ("davinci0", "davinci1"):
        (tmp_path / node).unlink()
    assert reason() == "the Ascend driver shows no NPU"
    (tmp_path / "davinci_manager").unlink()
    assert reason().startswith("no Ascend driver")


@pytest.mark.parametrize(
    ("closed", "named"),
    [({"davinci_manager"}, "davinci_manager"), ({"davinci0", "davinci1"}, "davinci0"), ({"davinci0"}, "")],
)
@pytest.mark.usefixtures("versions")
def test_the_user_needs_the_permission_for_one_npu(
    closed: set[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ASCEND_RT_VISIBLE_DEVICES may select an NPU that is not the first of the machine."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name not in closed)
    if named:
        assert reason() == f"no permission for {tmp_path / named}: add your user to the driver's group (HwHiAiUser)"
    else:
        assert reason().startswith("CANN is missing")


def test_both_packages_are_required_with_one_minor_version(versions: dict[str, str]) -> None:
    assert reason().startswith("CANN is missing: install it, and run its set_env.sh")
    versions["torch_npu"] = "2.12.1"
    assert "torch 2.13.0+cpu and torch_npu 2.12.1 do not match" in reason()
    del versions["torch_npu"]
    assert reason() == "2 Ascend NPUs are present, but torch_npu is not installed: install localllm[npu]"


@pytest.mark.parametrize(("name", "is_used"), [("Ascend910B2", True), ("host memory", False)])
def test_only_ascend_chips_are_npus(name: str, is_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu, "problem", str)
    monkeypatch.setattr(npu, "first", lambda: Npu(name, 2, 2**36, 2**35, "8.5.0"))
    if not is_used:
        assert reason() == "host memory is no Ascend NPU"
        return
    device = npu.probe()
    assert isinstance(device, DeviceInfo)
    assert (device.name, device.memory, device.free) == (name, 2**36, 2**35)
    assert device.features["CANN"] == "8.5.0"


def test_version_of_cann_is_unknown_if_its_library_has_no_such_function() -> None:
    def get(package: int, version: Any) -> int:
        ctypes.memmove(version, b"8.5.0", 6)
        return package

    assert cann_version(SimpleNamespace(aclsysGetCANNVersion=get)) == "8.5.0"
    assert cann_version(SimpleNamespace(aclsysGetCANNVersion=lambda package, version: 1)) == "unknown"
    assert cann_version(SimpleNamespace()) == "unknown"


def test_torch_npu_that_does_not_start_is_no_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example with another release of CANN, whose libraries lack a symbol."""
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(BackendUnavailable) as failure:
        npu.read_bandwidth()
    assert str(failure.value).startswith("backend npu is unavailable: torch_npu ")
    assert "does not start: import of torch_npu halted" in str(failure.value)
    assert "set_env.sh" in failure.value.hint
