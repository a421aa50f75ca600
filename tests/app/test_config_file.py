"""Changes of config.toml: comments and other lines stay, and a failed change writes nothing."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from localllm.app import config_file, toml_files
from localllm.app.errors import ConfigError, StorageFailed

WRITTEN = """\
# my settings
port = 8080  # mine
"quant" = 'int8'

allowed_hosts = [  # at home
    "a.lan",
    "b.lan",  # quant = "int4"
]
model = \"\"\"
guide\"\"\"
# quant = "fp8"
idle_unload = 2.0"""


@pytest.mark.parametrize(
    ("changes", "removed", "added"),
    [
        ({"port": 1}, ["port = 8080  # mine"], ["port = 1  # mine"]),
        ({"quant": "int4"}, ["\"quant\" = 'int8'"], ['"quant" = "int4"']),
        ({"quant": None}, ["\"quant\" = 'int8'"], []),
        ({"model": "org/m"}, ['model = """', 'guide"""'], ['model = "org/m"']),
        ({"allowed_hosts": None}, WRITTEN.splitlines()[4:8], []),
        ({"idle_unload": 3.0, "threads": 2}, ["idle_unload = 2.0"], ["idle_unload = 3.0", "threads = 2"]),
        ({"threads": None}, [], []),
    ],
)
def test_other_lines_stay(tmp_path: Path, changes: dict[str, Any], removed: list[str], added: list[str]) -> None:
    file = tmp_path / "config.toml"
    file.write_text(WRITTEN)
    before = tomllib.loads(WRITTEN)
    values = config_file.change(file, changes)
    assert values == {name: value for name, value in (before | changes).items() if value is not None}
    assert tomllib.loads(file.read_text()) == values
    lines = file.read_text().splitlines()
    assert [line for line in lines if line not in added] == [
        line for line in WRITTEN.splitlines() if line not in removed
    ]


@pytest.mark.parametrize(
    ("written", "changes"),
    [
        ("port =", {"quant": "int8"}),
        ("prot = 1", {"quant": "int8"}),
        ("port = 1", {"port": 70000}),
        ("port = 1", {"port": 2, "colour": 3}),
    ],
)
def test_a_refused_change_writes_nothing(tmp_path: Path, written: str, changes: dict[str, Any]) -> None:
    file = tmp_path / "config.toml"
    file.write_text(written)
    with pytest.raises(ConfigError):
        config_file.change(file, changes)
    assert file.read_text() == written


def test_a_link_and_the_mode_stay(tmp_path: Path) -> None:
    target = tmp_path / "dotfiles" / "my.toml"
    target.parent.mkdir()
    target.write_text("")
    target.chmod(0o640)
    link = tmp_path / "config.toml"
    link.symlink_to(target)
    config_file.change(link, {"port": 7})
    assert link.is_symlink()
    assert target.read_text() == "port = 7\n"
    assert target.stat().st_mode & 0o777 == 0o640
    assert list(target.parent.iterdir()) == [target]


def test_a_failed_write_keeps_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.toml"
    file.write_text("port = 1\n")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(StorageFailed, match="disk full"):
        toml_files.replace(file, "port = 2\n")
    assert file.read_text() == "port = 1\n"
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]
