"""The environment of tests/npu, and its contract tests: the calls of the backend fit the schemas and the meta kernels
of the published torch_npu."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ...npu import environment
from ...npu.environment import HERE, ROOT, VERSION

TORCH = torch.__version__.partition("+")[0]


@pytest.mark.contract
def test_calls_fit_torch_npu() -> None:
    """Downloads nothing: make test-npu installs torch_npu, and runs the same tests with all others."""
    if not environment.is_installed() or TORCH != VERSION:
        pytest.skip(f"torch_npu {VERSION} is not in build/npu: make test-npu installs it")
    environment.compile_libraries()
    files = [str(file) for file in sorted(HERE.glob("test_*.py")) if "mark.contract" in file.read_text("utf-8")]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "contract", *files]
    run = subprocess.run(
        command, cwd=ROOT, env=variables | environment.variables(), capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]
    assert "tier contract: " in run.stdout


def test_interrupted_installation_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = f"torch_npu-{VERSION}.dist-info"

    def pip(command: list[str], interrupted: bool, **options: object) -> None:
        folder = Path(command[command.index("--target") + 1])
        (folder / package).mkdir(parents=True)
        if interrupted:
            raise KeyboardInterrupt
        (folder / "yaml").mkdir()

    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "SITE", tmp_path / "site")
    monkeypatch.setattr(subprocess, "run", lambda command, **options: pip(command, True))
    with pytest.raises(KeyboardInterrupt):
        environment.install()
    assert not environment.is_installed()
    monkeypatch.setattr(subprocess, "run", lambda command, **options: pip(command, False))
    environment.install()
    assert {entry.name for entry in (tmp_path / "site").iterdir()} == {package, "yaml"}


def test_the_fake_is_not_in_the_wheel() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    packages = project.partition("[tool.scikit-build.wheel.packages]")[2].partition("\n\n")[0]
    assert packages.count("=") == 5
    assert "tests" not in packages
