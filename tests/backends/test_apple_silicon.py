"""Packages that pip installs on Apple silicon, by the requirements of the packages in this environment: no torch."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
APPLE = {"sys_platform": "darwin", "platform_system": "Darwin", "platform_machine": "arm64", "os_name": "posix"}
LINUX = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}


def installed_packages(dependencies: list[str], machine: dict[str, str]) -> set[str]:
    """Names of all packages that these requirements install on a machine. The requirements of a package that is not
    installed here are unknown: on Linux that is mlx-metal, which has none."""
    result, waiting = set[tuple[str, str]](), [(Requirement(one), "") for one in dependencies]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate(
            {**default_environment(), **machine, "extra": extra}  # type: ignore[arg-type]
        ):
            continue
        name = canonicalize_name(requirement.name)
        for extra_name in ("", *requirement.extras):
            if (name, extra_name) not in result:
                result.add((name, extra_name))
                waiting += [(Requirement(one), extra_name) for one in _needs(name)]
    return {name for name, _ in result}


def _needs(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:
        return []


@pytest.fixture
def dependencies() -> list[str]:
    result: list[str] = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    return result


def test_apple_silicon_gets_mlx_and_no_torch(dependencies: list[str]) -> None:
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed, so its requirements are unknown")
    result = installed_packages(dependencies, APPLE)
    assert {"mlx", "mlx-lm", "mlx-metal", "transformers"} <= result
    assert not {name for name in result if "torch" in name or name.startswith("nvidia")}


def test_others_get_torch_and_no_mlx(dependencies: list[str]) -> None:
    result = installed_packages(dependencies, LINUX)
    assert "torch" in result
    assert not {name for name in result if name.startswith("mlx")}
