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


def drawn_in(wanted: list[str], machine: dict[str, str]) -> set[str]:
    """Names of all packages that are installed with these on such a machine. What none of the packages here is tells
    nothing of its own needs: on Linux that is mlx-metal, which has none."""
    result, waiting = set[tuple[str, str]](), [(Requirement(one), "") for one in wanted]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate(
            {**default_environment(), **machine, "extra": extra}  # type: ignore[arg-type]
        ):
            continue
        name = canonicalize_name(requirement.name)
        for asked in ("", *requirement.extras):
            if (name, asked) not in result:
                result.add((name, asked))
                waiting += [(Requirement(one), asked) for one in _needs(name)]
    return {name for name, _ in result}


def _needs(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:
        return []


@pytest.fixture
def wanted() -> list[str]:
    result: list[str] = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    return result


def test_apple_silicon_gets_mlx_and_no_torch(wanted: list[str]) -> None:
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed, so that nothing says what it needs")
    result = drawn_in(wanted, APPLE)
    assert {"mlx", "mlx-lm", "mlx-metal", "transformers"} <= result
    assert not {name for name in result if "torch" in name or name.startswith("nvidia")}


def test_others_get_torch_and_no_mlx(wanted: list[str]) -> None:
    result = drawn_in(wanted, LINUX)
    assert "torch" in result
    assert not {name for name in result if name.startswith("mlx")}
