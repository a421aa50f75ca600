"""Completion of names: every parameter that takes a name, and the scripts in the real shells."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

from localllm.app import paths
from localllm.app.cli import cli, main
from localllm.app.store import preferences

from .store.local.test_snapshots import ADAPTER, WHOLE, make
from .test_cli import LEAVES

HOSTILE = "$(touch pwned)"


@pytest.fixture
def cache() -> None:
    make("org/whole", WHOLE)
    make("org/lora", ADAPTER)
    make("Qwen/Qwen3-0.6B", WHOLE)
    (paths.hub_cache_dir() / "models--org--unfinished" / "blobs").mkdir(parents=True)
    preferences.set_alias("small", "org/whole")


def complete(*words: str) -> list[str]:
    """The completions of the last word."""
    *args, incomplete = words
    found = ShellComplete(cli, {}, "localllm", "_LOCALLLM_COMPLETE").get_completions(list(args), incomplete)
    return [item.value for item in found]


MODELS = {"guide", "org/whole", "Qwen/Qwen3-0.6B", "small", "qwen3:0.6b"}
STORED = MODELS | {"org/lora", "org/unfinished", "pirate"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("chat",), MODELS),
        (("run",), MODELS),
        (("stop",), MODELS),
        (("bench",), MODELS),
        (("config",), MODELS),
        (("adapters", "load", "x", "--model"), MODELS),
        (("show",), STORED),
        (("verify", "guide"), STORED),
        (("rm",), STORED),
        (("inspect",), STORED | {"llama3.2:1b"}),
        (("fit",), STORED | {"llama3.2:1b"}),
        (("alias", "name"), STORED | {"llama3.2:1b"}),
        (("pull", "org/x"), {"llama3.2:1b", "org/whole", "org/unfinished"}),
        (("alias",), {"small"}),
        (("adapters", "load"), {"org/lora", "pirate"}),
        (("adapters", "rm"), {"org/lora", "pirate"}),
        (("adapters", "unload"), {"lora", "pirate"}),
        (("run", "guide", "--adapter"), {"lora", "pirate"}),
        (("doctor", "--backend"), {"auto", "cpu"}),
    ],
)
def test_names_are_completed(cache: None, words: tuple[str, ...], expected: set[str]) -> None:
    found = complete(*words, "")
    assert expected <= set(found)
    assert len(found) == len(set(found))
    if expected == MODELS:
        assert not {"org/lora", "org/unfinished", "llama3.2:1b"} & set(found)


def test_every_parameter_that_takes_a_name_has_a_completion() -> None:
    """A new command with a name must choose a type."""
    without = []
    for path, command in LEAVES.items():
        for parameter in command.params:
            takes_a_name = parameter.name in ("model", "name", "names", "adapter") and parameter.param_type_name
            if takes_a_name and isinstance(parameter.type, click.types.StringParamType):
                without.append((" ".join(path), parameter.name))
    assert without == [("import", "name"), ("adapters load", "name")], "these are new names"


def test_case_is_ignored_and_paths_are_left_to_the_shell(cache: None) -> None:
    assert complete("run", "QWEN") == ["Qwen/Qwen3-0.6B", "qwen3:0.6b"]
    assert complete("run", "qwen3:0") == ["qwen3:0.6b"]
    found = ShellComplete(cli, {}, "localllm", "x").get_completions(["run"], "./mo")
    assert [(item.type, item.value) for item in found] == [("file", "./mo")]


@pytest.mark.parametrize("file", [paths.user_catalog_file, paths.models_file])
def test_malformed_file_of_the_user_gives_no_completion_and_no_error(file: Callable[[], Path]) -> None:
    file().parent.mkdir(parents=True, exist_ok=True)
    file().write_text("x = [")
    for words in (("run", ""), ("pull", ""), ("inspect", ""), ("alias", "")):
        complete(*words)


def program(folder: Path) -> Path:
    """A folder with the program `localllm`, for PATH."""
    binaries = folder / "bin"
    binaries.mkdir()
    script = binaries / "localllm"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m localllm.app.cli "$@"\n')
    script.chmod(0o755)
    return binaries


def run_shell(shell: str, code: str, folder: Path) -> list[str]:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    environment = {**os.environ, "PATH": f"{program(folder)}:{os.environ['PATH']}"}
    flags = ["-f"] if shell == "zsh" else []
    done = subprocess.run(
        [shell, *flags, "-c", code], capture_output=True, text=True, timeout=100, env=environment, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout.split()


def script_of(shell: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    (folder / "script").write_text(capsys.readouterr().out)
    return shlex.quote(str(folder / "script"))


def test_bash_completes_names_with_a_colon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """bash splits words at colons and replaces only the part after the last one."""
    script = script_of("bash", tmp_path, capsys)
    lines = [
        ("localllm", "pull", "qwen3:"),
        ("localllm", "pull", "qwen3", ":", "0"),
        ("localllm", "chat", "gui"),
        ("localllm", "run", HOSTILE),
    ]
    code = f"source {script}\n"
    for words in lines:
        code += f"COMPREPLY=(); COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}\n"
        code += '_localllm_completion localllm; echo "${COMPREPLY[@]}" end\n'
    printed = " ".join(run_shell("bash", code, tmp_path))
    with_colon, after_colon, guide, hostile, _ = printed.split("end")
    assert "0.6b" in with_colon.split()
    assert after_colon.split() == ["0.6b", "0.6b-fp8"]
    assert guide.split() == ["guide"]
    assert hostile.split() == []
    assert not (tmp_path / "pwned").exists()


def test_zsh_completes_names_with_a_colon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = script_of("zsh", tmp_path, capsys)
    code = f"""compdef() {{ : }}; compadd() {{ print -l -- $completions }}; source {script}
words=(localllm pull qwen3:0); CURRENT=3; _localllm_completion
words=(localllm chat gui); CURRENT=3; _localllm_completion
"""
    assert run_shell("zsh", code, tmp_path) == ["qwen3:0.6b", "qwen3:0.6b-fp8", "guide"]


def test_fish_completes_names_with_a_colon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = script_of("fish", tmp_path, capsys)
    code = f"source {script}; complete -C 'localllm pull qwen3:0'; complete -C 'localllm chat gui'"
    assert run_shell("fish", code, tmp_path) == ["qwen3:0.6b", "qwen3:0.6b-fp8", "guide"]


def test_completion_of_settings_of_serve() -> None:
    assert "--idle-unload" in complete("serve", "--idle")
    assert complete("co") == ["config", "completion"]
