"""The command line without a daemon: help, errors, exit codes and settings."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from localllm.app import config, errors, paths, start
from localllm.app.cli import cli, main
from localllm.app.commands import console
from localllm.app.commands.run import _prompt
from localllm.app.errors import ConfigError
from localllm.app.version import VERSION

COMMANDS = [
    "chat",
    "run",
    "serve",
    "ps",
    "stop",
    "list",
    "pull",
    "inspect",
    "fit",
    "rm",
    "show",
    "verify",
    "prune",
    "import",
    "alias",
    "search",
    "adapters",
    "doctor",
    "bench",
    "selftest",
    "config",
    "completion",
]


def leaves(group: click.Group, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command that is no group, with its words on the command line."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from leaves(command, *path, name)
        else:
            yield (*path, name), command


LEAVES = dict(leaves(cli))


def every_option() -> list[tuple[str, click.Option]]:
    options = []
    for path, command in LEAVES.items():
        name = " ".join(path)
        context = click.Context(command, info_name=name)
        options += [(name, option) for option in command.get_params(context) if isinstance(option, click.Option)]
    return options


def test_commands_are_complete_and_in_order() -> None:
    assert list(cli.commands) == COMMANDS
    assert sorted(cli.list_commands(click.Context(cli))) == sorted(COMMANDS), "each command has one section"


@pytest.mark.parametrize("name", [*COMMANDS, *map(" ".join, LEAVES)])
def test_help_fits_100_columns_and_has_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*name.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert f"localllm {name}" in text.partition("Examples:")[2], "an example of the command itself"
    assert max(map(len, text.splitlines())) <= 100


def test_help_of_pull_has_each_kind_of_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "--help"]) == 0
    text = capsys.readouterr().out
    for name in ("qwen3:0.6b", "org/repo@revision", "ms:org/repo"):
        assert name in text


def test_examples_are_accepted() -> None:
    """Every example in a help text parses: its command and flags exist."""
    commands = [*cli.commands.values(), *LEAVES.values()]
    lines = [line for command in commands for line in (command.help or "").splitlines()]
    examples = [line.rpartition("localllm ")[2] for line in lines if re.match(r"  .*\blocalllm \w", line)]
    assert len(examples) > 20
    for example in examples:
        name, *rest = re.split(r"\s+(?=(?:[^\"]*\"[^\"]*\")*[^\"]*$)", re.split(r" >+ | \| ", example)[0])
        command = cli.commands[name]
        if isinstance(command, click.Group):
            command = command.commands[rest.pop(0)]
        valid_flags = {flag for option in command.get_params(click.Context(command)) for flag in option.opts}
        for word in rest:
            assert not word.startswith("--") or word in valid_flags, f"{word} in {example!r}"


def test_short_help_is_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert "..." not in text.partition("Chat:")[2]
    assert all(f"  {name} " in text for name in COMMANDS)


def test_help_has_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out.partition("Exit codes: ")[2]
    documented = {int(code) for code in re.findall(r"\b(\d+) [a-z]", printed)}
    assert documented == {0, start.INTERRUPTED, *(error.exit_code for error in errors.BY_CODE.values())}


def test_every_option_has_a_sentence() -> None:
    for command, option in every_option():
        sentence = option.help or ""
        assert sentence.rstrip("]").partition(" [")[0].endswith("."), f"{command} {option.opts[0]}"


def test_serve_has_a_flag_for_every_setting_of_the_daemon() -> None:
    flags = {option.name for command, option in every_option() if command == "serve"}
    names = {setting.name for setting in config.describe()}
    assert {name for name in flags if not name.endswith("help")} == names - config.CLIENT_ONLY


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["rnu"], "Did you mean 'run'"),
        (["run", "guide", "hi", "--max-token", "3"], "'--max-tokens'"),
        (["run", "guide", "hi", "--top-k", "many"], "'many' is not a valid integer"),
        (["run"], "Missing argument 'MODEL'"),
        (["run", "guide", "hi", "--backend", "cuba"], "'cuba' is not one of"),
        (["bench", "--rounds", "0"], "0 is not in the range"),
        (["bench", "--together", "1"], "1 is not in the range"),
        (["serve", "--port", "99999"], "port in --port: Expected `int` <= 65535"),
        (["serve", "--dtype", "int3"], "'int3' is not one of"),
        (["run", "guide", "hi", "--schema", "no-such-file"], "no-such-file"),
        (["run", "guide", "hi", "--schema", __file__], "is not JSON"),
        (["run", "guide", "hi", "--schema", __file__, "--regex", "a"], "only one of"),
        (["completion", "tcsh"], "'tcsh' is not one of"),
        (["adapters", "laod"], "'load'"),
        (["adapters", "rm", "./pirate"], "deletes only files that it downloaded"),
        (["run", "guide", "hi", "--adapter", "a=b"], "'a=b' is not NAME or NAME=SCALE"),
        (["run", "guide", "hi", "--adapter", "a=1e9"], "'a=1e9' is not NAME or NAME=SCALE"),
    ],
)
def test_wrong_usage_is_one_line_a_hint_and_exit_code_2(
    args: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert says in err.splitlines()[0]


def test_error_is_json_with_json_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json", "--nonsense"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    error = json.loads(err)["error"]
    assert error["code"] == "invalid_request"
    assert "--nonsense" in error["message"]
    assert error["hint"]


@pytest.mark.parametrize("command", LEAVES)
def test_every_command_rejects_a_malformed_settings_file(
    command: tuple[str, ...], own_folders: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = paths.config_file()
    file.parent.mkdir(parents=True)
    file.write_text("prot = 1\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    names = [param.name for param in LEAVES[command].params if isinstance(param, click.Argument) and param.required]
    arguments = {"model": "guide", "shell": "bash", "path": "none"}
    arguments |= dict.fromkeys(("name", "names", "adapter"), "org/none")
    code = main([*command, *(arguments[str(name)] for name in names)])
    out, err = capsys.readouterr()
    if command == ("completion",):  # an error would disturb the start of a shell
        assert (code, err) == (0, "")
        return
    assert (code, out) == (ConfigError("").exit_code, "")
    assert "unknown setting 'prot'" in err


def prompt_from(stdin: Path, prompt: str | None, read_before: int, monkeypatch: pytest.MonkeyPatch) -> str:
    with stdin.open("rb") as file:
        file.seek(read_before)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(file))
        return _prompt(prompt)


def test_run_does_not_read_the_input_file_of_a_shell_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lines").write_text("one\ntwo\n")
    assert prompt_from(tmp_path / "lines", "one", 4, monkeypatch) == "one"
    assert "standard input is ignored" in capsys.readouterr().err
    assert prompt_from(tmp_path / "lines", "ask", 0, monkeypatch) == "ask\n\none\ntwo"
    assert "the prompt includes standard input (7 characters)" in capsys.readouterr().err
    assert prompt_from(tmp_path / "lines", None, 4, monkeypatch) == "two"
    assert capsys.readouterr().err == ""


def test_error_for_a_missing_folder_names_the_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "./nowhere", "hi"]) == errors.ModelNotFound.exit_code
    assert "nowhere" in capsys.readouterr().err


def test_control_characters_are_not_written_to_a_terminal() -> None:
    assert console.safe("a\x1b]0;title\x07\x9b31mb\r\n\tc") == "a\ufffd]0;title\ufffd\ufffd31mb\ufffd\n\tc"


def process(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "localllm.app.cli", *args]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=100)


def test_argument_that_is_not_utf8_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "guide", "gr\udcf6\udcdfe"]) == 2
    assert "is not text in this encoding" in capsys.readouterr().err


def test_output_in_another_encoding_has_replacements() -> None:
    code = "from localllm.app.cli import main; import click; main(['alias']); click.echo('gr\u00f6\u00dfe \u65e5')"
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert (done.returncode, done.stdout) == (0, "größe ?\n".encode("latin-1")), done.stderr


def test_version() -> None:
    assert re.fullmatch(r"localllm \d+\.\d+\.\d+\n", process("--version").stdout)


def test_uninstalled_copy_can_start_the_daemon() -> None:
    code = (
        "import importlib.metadata as found; found.Distribution.discover = lambda **_: iter(()); "
        "import localllm.app.daemon.lifecycle; from localllm.app.cli import main; main(['--version'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == f"localllm {VERSION}\n", done.stderr


def test_help_imports_no_large_package() -> None:
    code = "import sys; from localllm.app.cli import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr.split()
    assert not {"torch", "numpy", "textual", "httpx", "huggingface_hub", "rich", "asyncio", "msgspec"} & set(loaded)


@pytest.mark.parametrize("args", [["list"], ["doctor"], ["config", "--json"], ["serve", "--help"]])
def test_commands_do_not_import_torch(args: list[str]) -> None:
    code = (
        f"import sys; from localllm.app.cli import main; main({args}); print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "False"


def test_help_of_serve_has_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    groups: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith(" "):
            rows = groups.setdefault(line.rstrip(":"), [])
        elif line.startswith("  -"):
            rows.append(line.split()[0].removeprefix("--").replace("-", "_"))
    expected = {title: list(names) for title, names in config.GROUPS.items()}
    assert {title: names for title, names in groups.items() if title in expected} == expected
    assert groups["Other options"] == ["_h,"]
    shown = [name for names in expected.values() for name in names]
    settings = {setting.name for setting in config.describe()} - config.CLIENT_ONLY
    assert (set(shown), len(shown)) == (settings, len(settings)), "each setting has one group"


def test_broken_pipe_prints_no_error() -> None:
    command = f"{shlex.quote(sys.executable)} -m localllm.app.cli config | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=100)
    assert done.stderr == ""


def test_colours_need_a_terminal() -> None:
    assert "\x1b" not in process("rnu").stderr


def test_list_shows_the_built_in_model() -> None:
    entries = json.loads(process("list", "--json").stdout)
    assert entries[0]["id"] == "guide"
    assert entries[0]["bundled"] is True
    text = process("list").stdout
    assert text.splitlines()[0].split() == ["MODEL", "SIZE", "CONTEXT", "DESCRIPTION"]
    assert "tiny built-in model" in text


def test_config_shows_the_source_of_each_value(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('max_rows = 8\napi_key = "sesame"\n')
    done = process("config", "--json", LOCALLLM_CONFIG=str(file), LOCALLLM_PORT="8080")
    settings = {entry["name"]: entry for entry in json.loads(done.stdout)["settings"]}
    assert (settings["max_rows"]["value"], settings["max_rows"]["from"]) == (8, str(file))
    assert (settings["port"]["value"], settings["port"]["from"]) == (8080, "LOCALLLM_PORT")
    assert (settings["idle_unload"]["value"], settings["idle_unload"]["from"]) == (900.0, "default")
    assert "sesame" not in done.stdout
    assert "sesame" not in process("config", LOCALLLM_CONFIG=str(file)).stdout


def test_ps_and_stop_report_that_no_daemon_runs() -> None:
    for args, words in ((("ps",), "no daemon is running"), (("stop",), "no daemon is running")):
        done = process(*args)
        assert (done.returncode, done.stdout) == (0, "")
        assert words in done.stderr
    assert json.loads(process("ps", "--json").stdout) == []


def test_stop_accepts_the_path_of_deleted_files(tmp_path: Path) -> None:
    """A loaded model stays loaded when its files are deleted."""
    done = process("stop", str(tmp_path / "m.gguf"))
    assert "no daemon is running" in done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("plain", [None, "stdin", "stdout", "stderr"])
def test_chat_opens_the_screen_only_if_all_standard_streams_are_a_terminal(
    plain: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from localllm.app import tui
    from localllm.app.commands import chat

    opened: list[str] = []
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(getattr(sys, name), "isatty", lambda terminal=name != plain: terminal)
    monkeypatch.setattr(tui, "run", lambda *arguments, **named: opened.append("screen") or 0)
    monkeypatch.setattr(chat, "_lines", lambda *arguments: opened.append("lines"))
    chat.chat("guide", {}, {"system": None})
    assert opened == ["lines" if plain else "screen"]
