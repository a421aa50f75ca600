"""Hostile names on every command of the store: a clear error, nothing written, nothing deleted outside of the store."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from localllm.app import paths
from localllm.app.cli import main
from localllm.app.daemon.adapters import Adapters
from localllm.app.daemon.names import Names
from localllm.app.errors import InvalidRequest
from localllm.app.store import listing, resolved
from localllm.app.store.changes import prune
from localllm.app.store.hub import searching
from localllm.app.store.local import finding, snapshots
from localllm.app.store.records import HubMatch

from ...engine.files.gguf_files import TINY, model
from ..hub import Hub, model_files, serving
from .local.test_snapshots import WHOLE, make
from .test_names import HOSTILE

COMMANDS = [
    ("show", "{}"),
    ("inspect", "{}"),
    ("fit", "{}"),
    ("verify", "{}"),
    ("pull", "--yes", "{}"),
    ("rm", "--yes", "{}"),
    ("rm", "--yes", "--packed", "{}"),
    ("import", "{folder}", "--name", "{}"),
    ("alias", "name", "{}"),
    ("alias", "{}", "guide"),
    ("alias", "{}", "--rm"),
    ("config", "{}", "quant=int4"),
    ("adapters", "rm", "--yes", "{}"),
    ("adapters", "load", "{}"),
]
MORE = [
    "../../outside",
    "./\udcff",
    "\udcff",
    "./a\x1b[31mb",
    "/" + "x" * 5000,
    "~nobody/x",
    "org/repo@" + "x" * 300,
    "local/..",
    "ms:local/x/y",
    "-x",
    "--yes=",
    "models--org--m",
    "org--m",
    "ORG/M/../m",
    "%2e%2e/x",
    "org/m%00",
    "ａｂｃ",
    "e\u0301",
    "\u00e9",
]


@pytest.fixture
def outside(own_folders: Path) -> Iterator[Path]:
    """A folder with files of the user, which no command may change."""
    make("org/m", WHOLE)
    folder = own_folders / "outside"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("secret")
    before = state(own_folders)
    yield folder
    assert state(own_folders) == before


def state(home: Path) -> dict[str, bytes | None]:
    """Every file below a folder, without the logs of commands."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(home.rglob("*"))}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_hostile_names_are_refused_without_a_trace(
    command: tuple[str, ...], outside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for hostile in [*HOSTILE, *MORE]:
        name = hostile
        args = [word.replace("{folder}", str(outside)).replace("{}", name) for word in command]
        if name.startswith("-"):
            args = [arg for arg in args if arg != name] + ["--", name]
        code = main(args)
        printed = capsys.readouterr()
        assert code in (2, 3, 4, 5, 10), (args, code, printed)
        assert not printed.out, args
        lines = printed.err.splitlines()
        assert lines[0].startswith("error: "), args
        assert len(lines) <= 3, (args, lines)
        assert all(line.isprintable() for line in lines), (args, lines)
        assert max(map(len, lines)) < 1000, args


def test_links_in_the_store_are_not_followed_by_deletions(own_folders: Path) -> None:
    """The cache folder of a repository, a snapshot and a blob are links to files of the user."""
    documents = own_folders / "documents"
    documents.mkdir()
    (documents / "letter").write_text("text")
    folder = paths.hub_cache_dir()
    folder.mkdir(parents=True)
    (folder / "models--org--link").symlink_to(documents)
    snapshot = make("org/inside", WHOLE)
    (snapshot / "linked").symlink_to(documents)
    (snapshot.parent.parent / "blobs" / "letter").symlink_to(documents / "letter")
    (snapshot.parent / ("d" * 40)).symlink_to(documents)
    prune.delete(prune.find_unused(everything=True))
    assert main(["rm", "org/link", "--yes"]) == 0
    assert main(["rm", "org/inside@main", "--yes"]) == 0
    assert main(["rm", "org/inside", "--yes"]) in (0, 3)
    assert (documents / "letter").read_text() == "text"
    assert [path.name for path in folder.glob("models--*")] == []


@pytest.mark.parametrize("content", ["../../../../etc", "/etc", "", "x" * 10**6, "\x00", "a" * 40])
def test_hostile_references_name_no_snapshot(content: str) -> None:
    snapshot = make("org/m", WHOLE)
    (snapshot.parent.parent / "refs" / "main").write_text(content)
    assert finding.find_model("org/m") is None
    assert [model.id for model in listing.listed()] == ["guide", f"org/m@{'c' * 12}"]


def test_repository_with_hostile_file_names_is_not_downloaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], own_folders: Path
) -> None:
    names = ["../../../pwned", "a\u0301.json", "CON.json", "/etc/x.json"]
    repos = {f"org/evil{number}": {**model_files(), name: b"{}"} for number, name in enumerate(names)}
    repos["org/evil1"]["\u00e1.json"] = b"{}"
    with serving(Hub(repos)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        for repo in repos:
            for command in (["pull", "--yes", repo], ["inspect", repo], ["fit", repo]):
                assert main(command) == 2
                assert "unsafe name" in (error := capsys.readouterr().err) or "same name" in error
    assert not finding.find_model("org/evil0")
    assert not list(paths.hub_cache_dir().glob("models--*"))
    assert not [path for path in own_folders.rglob("*") if "pwned" in path.name]


def test_names_of_folders_in_the_cache_cannot_leave_it() -> None:
    """Folders that another program has created with strange names."""
    folder = paths.hub_cache_dir()
    for name in ("models--..--..", "models--", "models--a", "models--a--b--c", "models--org--\x1b[31m", "models--é--x"):
        (folder / name / "snapshots" / ("a" * 40)).mkdir(parents=True)
    assert [model.id for model in listing.listed()] == ["guide"]
    for id in snapshots.ids():
        if id not in ("guide", "pirate", "steps"):
            assert main(["show", id]) in (2, 3)
            assert main(["inspect", "--", id]) in (2, 3, 10)
    assert main(["rm", "--yes", "../.."]) == 2
    assert folder.is_dir()


def test_text_of_a_repository_cannot_control_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names of files and the error of a template, in lists of other programs' files; names of a hub in a search."""
    evil = "\x1b[2J\u202e\x9b31m"
    snapshot = make("org/m", {**WHOLE, f"a{evil}.json": "{}", "README.md": "---\nlicense: mit\n---"})
    template = {"chat_template": "{{ raise_exception('" + evil + "') }}"}
    (snapshot / "tokenizer_config.json").write_text(json.dumps(template))
    monkeypatch.setattr(searching, "search_hub", lambda *_: [HubMatch(id=f"org/{evil}", downloads=1, licence=evil)])
    for command in (["show", "org/m"], ["verify", "org/m"], ["list"], ["search", "zzz"], ["inspect", "org/m"]):
        main(command)
        printed = capsys.readouterr()
        for character in "\x1b\x9b":
            assert character not in printed.out + printed.err, command


EVIL = b"m\xff\x1b[2J\n-Q8_0.gguf"
ON_PATHS: list[list[str]] = [
    ["show"],
    ["inspect"],
    ["verify"],
    ["fit"],
    ["import", "--name=x"],
    ["import", "--copy", "--name=y"],
    ["config"],
    ["alias", "a"],
    ["adapters", "load", "--model=guide"],
    ["stop"],
    ["chat"],
    ["run", "--"],
]


def put(path: bytes, content: bytes) -> None:
    """Write a file with a name that may be no text. Skips the test if the file system refuses the name."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120 - bytes
        with open(path, "wb") as file:  # noqa: PTH123
            file.write(content)
    except OSError:
        pytest.skip("this file system has only names in UTF-8")


def check_output(command: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command. Its output has no control character, and its JSON is readable with a strict parser."""
    code = main(command)
    printed = capsys.readouterr()
    text = printed.out + printed.err
    assert code in (0, 1, 2, 3, 5), (command, text)
    assert not {"\x1b", "\x9b"} & set(text), command
    text.encode()  # raises for a byte that is no UTF-8
    if "--json" in command:
        msgspec.json.decode(printed.out or printed.err.splitlines()[-1])
    return text


@pytest.mark.parametrize("command", ON_PATHS, ids=" ".join)
def test_path_that_is_no_text_is_refused_or_shown(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The working folder, or a file of the named folder, has a name with other bytes and with control characters."""
    base = os.fsencode(tmp_path)
    gguf = model(TINY)
    put(base + b"/d\xff/m-Q8_0.gguf", gguf)
    put(base + b"/esc/a\x1b[31m\nb.gguf", gguf)
    put(base + b"/evil/" + EVIL, gguf)
    put(base + b"/two/a\xff.gguf", gguf)
    put(base + b"/two/b\xff.gguf", gguf)
    monkeypatch.chdir(os.fsdecode(base + b"/d\xff"))
    names = ["m-Q8_0.gguf", "./m-Q8_0.gguf", "."]
    if command[0] != "adapters":  # which would start a daemon for the file in these folders
        names += [f"{tmp_path}/{name}" for name in ("esc", "evil", "two")]
    for name in names:
        arguments = [*command, name, *(["hi"] if command[0] == "run" else [])]
        text = check_output(arguments, capsys)
        if command[0] not in ("show", "verify") and not name.endswith("two"):
            assert "rename the file" in text, arguments
        if command[0] not in ("chat", "run", "stop"):
            check_output([*command, "--json", name], capsys)


def test_commands_show_a_cache_with_names_that_are_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other programs may write to the cache, and its own path may be no text."""
    for folder in (b"hf", b"hf\xff"):
        cache_folder = os.path.join(os.fsencode(tmp_path), folder)  # noqa: PTH118
        snapshot = cache_folder + b"/models--org--m/snapshots/" + b"c" * 40
        for name in (EVIL, b"n-Q4_0.gguf", b"sub\xff/k-Q5_0.gguf"):
            put(snapshot + b"/" + name, model(TINY))
        put(snapshot + b"/x\xff\x1b[2J.md", b"x")
        put(cache_folder + b"/models--org--m/refs/main", b"c" * 40)
        put(cache_folder + b"/models--org--m/refs/v\xff", b"c" * 40)
        put(cache_folder + b"/models--org--z/blobs/a\xff.incomplete", b"x")
        put(cache_folder + b"/models--org--e\xff/refs/main", b"c" * 40)
        monkeypatch.setenv("HF_HUB_CACHE", os.fsdecode(cache_folder))
        for command in ("list", "verify", "prune --dry-run --all", "show org/m", "show org/m:Q8_0", "verify org/m"):
            check_output(command.split(), capsys)
            check_output([*command.split(), "--json"], capsys)
        for command in ("inspect org/m:Q8_0", "fit org/m:Q8_0", "config org/m:Q8_0"):
            assert "rename the file" in check_output(command.split(), capsys), command
        with pytest.raises(InvalidRequest, match="no UTF-8 text"):
            resolved.model("org/m:Q8_0")
        with pytest.raises(InvalidRequest, match="no UTF-8 text"):
            asyncio.run(Names({}, Adapters()).select("org/m:Q8_0", local=True))
        models = [(model.id, model.description, model.problem) for model in listing.listed()]
        assert any("rename the file" in (problem or "") for _, _, problem in models)
        msgspec.json.encode(models)  # the daemon sends them
