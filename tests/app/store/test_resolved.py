"""The table of commands and kinds of names: all commands interpret a name in the same way."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.app import paths
from localllm.app.cli import main
from localllm.app.client import Client
from localllm.app.errors import AppError, WrongKind
from localllm.app.purpose import check_use, purpose_of
from localllm.app.store import listing, resolved
from localllm.engine.files.pooling import Pooling

from ...engine.files.gguf_corruptions import F32, Tensor, Value, content, text
from ...engine.files.gguf_files import TINY, model
from ..embedder import write_embedder
from ..hub import adapter_files, safetensors
from ..tiny_qwen import write_model
from .test_commands import store_model

BASE_GGUF = model(TINY)
CHAT_GGUF = model(TINY | {"tokenizer.chat_template": "{{ messages }}"})
EMBEDDING_GGUF = model(TINY | {"llama.pooling_type": 3})
ADAPTER_GGUF = content(
    {
        "general.architecture": text("llama"),
        "general.type": text("adapter"),
        "adapter.type": text("lora"),
        "adapter.lora.alpha": Value(F32, 4.0),
    },
    {"blk.0.attn_q.weight.lora_a": Tensor((32, 2)), "blk.0.attn_q.weight.lora_b": Tensor((2, 32))},
)

ADAPTER = "is an adapter, not a model"
MODEL = "is a model, not an adapter"
BASE = "is a base model without a chat template: it completes text, and does not chat"
EMBEDDING = "is an embedding model: it computes vectors, and generates no text"
UNFINISHED = "is not complete"
MISSING_FILES = "files are missing"
ALONE = "weights without config.json are no complete model"
ABSENT = "is not on this machine"

# Kind of a name -> (as a model, for a chat, for a text, as an adapter); empty: no error.
TABLE = {
    "org/chat": ("", "", "", MODEL),
    "org/base": ("", BASE, "", MODEL),
    "org/emb": ("", EMBEDDING, EMBEDDING, MODEL),
    "org/chat-GGUF": ("", "", "", MODEL),
    "org/base-GGUF": ("", BASE, "", MODEL),
    "org/emb-GGUF": ("", EMBEDDING, EMBEDDING, MODEL),
    "org/lora": (ADAPTER, ADAPTER, ADAPTER, ""),
    "org/lora-GGUF": (ADAPTER, ADAPTER, ADAPTER, ""),
    "org/half": (UNFINISHED, "", "", UNFINISHED),
    "org/gone": (MISSING_FILES, "", "", "is a model with missing files, not an adapter"),
    "local/weights": (ALONE, "", "", ALONE),
    "org/absent": (ABSENT, "", "", ABSENT),
    "absent": (ABSENT, "", "", ABSENT),
    "an-alias": (ADAPTER, ADAPTER, ADAPTER, ""),
    "./chat": ("", "", "", MODEL),
    "./base": ("", BASE, "", MODEL),
    "./emb": ("", EMBEDDING, EMBEDDING, MODEL),
    "./lora": (ADAPTER, ADAPTER, ADAPTER, ""),
    "./lora-GGUF/m.gguf": (ADAPTER, ADAPTER, ADAPTER, ""),
    "./base-GGUF/m.gguf": ("", BASE, "", MODEL),
    "./nothing": ("does not exist", "", "", "does not exist"),
}


def folder(root: Path, name: str) -> Path:
    path = root / name
    path.mkdir()
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each kind of files."""
    root = tmp_path_factory.mktemp("kinds")
    write_model(folder(root, "chat"))
    write_model(folder(root, "base"), template=None)
    write_embedder(folder(root, "emb"))
    for name, data in adapter_files().items():
        path = root / "lora" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    ggufs = {"chat": CHAT_GGUF, "base": BASE_GGUF, "emb": EMBEDDING_GGUF, "lora": ADAPTER_GGUF}
    for name, data in ggufs.items():
        (folder(root, f"{name}-GGUF") / "m.gguf").write_bytes(data)
    (folder(root, "weights") / "m.safetensors").write_bytes(safetensors(10))
    return root


@pytest.fixture
def kinds(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store with every kind of files."""
    monkeypatch.chdir(files)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for path in files.iterdir():
        snapshot = store_model(f"{'local' if path.name == 'weights' else 'org'}/{path.name}", path)
        for part in path.iterdir():  # the pooling of an embedding model
            if part.is_dir():
                shutil.copytree(part, snapshot / part.name)
    next(store_model("org/gone", files / "chat").glob("*.safetensors")).resolve().unlink()
    blobs = paths.hub_cache_dir() / "models--org--half" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc.0123.incomplete").write_bytes(bytes(100_000))
    assert main(["alias", "an-alias", "org/lora"]) == 0


def problem(work: Callable[[], object]) -> str:
    try:
        work()
    except AppError as error:
        return error.message
    return ""


@pytest.mark.usefixtures("kinds")
@pytest.mark.parametrize("name", TABLE)
def test_answer_about_each_kind(name: str) -> None:
    works: list[Callable[[], object]] = [
        lambda: resolved.model(name, allow_path=True),
        lambda: resolved.check_purpose(name, "chat"),
        lambda: resolved.check_purpose(name, "text"),
        lambda: resolved.adapter(name, allow_path=True),
    ]
    for work, words in zip(works, TABLE[name], strict=True):
        message = problem(work)
        assert words in message
        assert bool(words) is bool(message)


# Commands that use a name as a model, and as an adapter. They end before they would start a daemon.
AS_MODEL = ("run {} x", "chat {}", "config {}", "fit {}", "rm --packed {}", "bench {}")
AS_ADAPTER = ("adapters load {}", "adapters rm {} --yes")
OF_ANY_KIND = ("show {} --json", "verify {} --json", "pull {}", "inspect {} --json")


@pytest.fixture
def without_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that finds models as the real one does."""

    class Daemon:
        async def __aenter__(self) -> Daemon:
            return self

        async def __aexit__(self, *_: object) -> None: ...

        async def loaded(self) -> list[object]:
            return []

        async def load(self, model: str, **_: object) -> None:
            resolved.model(model, allow_path=True)
            raise AssertionError("a load")

    async def connect(*_: object, **__: object) -> Daemon:
        return Daemon()

    monkeypatch.setattr(Client, "connect", connect)


@pytest.mark.usefixtures("kinds", "without_daemon")
@pytest.mark.parametrize("command", AS_MODEL)
@pytest.mark.parametrize("name", ["org/lora", "org/lora-GGUF", "an-alias", "./lora", "./lora-GGUF/m.gguf"])
def test_adapter_in_the_place_of_a_model(
    command: str, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    assert main(command.format(name).split()) == WrongKind.exit_code
    errors = capsys.readouterr().err
    assert ADAPTER in errors
    assert "localllm pull" not in errors


@pytest.mark.usefixtures("kinds", "without_daemon")
@pytest.mark.parametrize("command", AS_ADAPTER)
@pytest.mark.parametrize("name", ["org/chat", "org/base", "org/emb", "org/chat-GGUF"])
def test_model_in_the_place_of_an_adapter(command: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.format(name).split()) == WrongKind.exit_code
    errors = capsys.readouterr().err
    assert MODEL in errors
    assert "localllm pull" not in errors


@pytest.mark.usefixtures("kinds")
@pytest.mark.parametrize("command", OF_ANY_KIND)
@pytest.mark.parametrize("name", ["org/base", "org/emb", "org/lora", "org/lora-GGUF", "org/chat-GGUF"])
def test_commands_for_every_kind(command: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.format(name).split()) == 0, capsys.readouterr().err


@pytest.mark.usefixtures("kinds")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/chat", "try: localllm chat org/chat"),
        ("org/base", 'it is a base model, which completes text; try: localllm run org/base "'),
        ("org/base-GGUF", 'it is a base model, which completes text; try: localllm run org/base-GGUF "'),
        ("org/emb", "it is an embedding model: POST /v1/embeddings"),
        ("org/emb-GGUF", "it is an embedding model: POST /v1/embeddings"),
        ("org/lora", "try: localllm adapters load org/lora --model MODEL"),
        ("org/lora-GGUF", "try: localllm adapters load org/lora-GGUF --model MODEL"),
    ],
)
def test_pull_and_import_name_the_use(name: str, words: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", name]) == 0
    assert f"{name} is ready" in (errors := capsys.readouterr().err)
    assert words in errors
    source = files / name.partition("/")[2]
    assert main(["import", str(source / "m.gguf" if "GGUF" in name else source), "--name", "x"]) == 0
    assert words.replace(name, "local/x") in capsys.readouterr().err
    assert main(["pull", name, "--json"]) == 0
    pulled = json.loads(capsys.readouterr().out)
    expected = None if "lora" in name else {"b": "base", "c": "chat", "e": "embedding"}[name[4]]
    assert (pulled["purpose"], pulled["problem"]) == (expected, None)


@pytest.mark.usefixtures("kinds")
def test_list_names_the_purpose(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    purposes = {entry["id"]: entry["purpose"] for entry in json.loads(capsys.readouterr().out)}
    expected = {"org/base": "base", "org/base-GGUF": "base", "org/emb": "embedding", "org/emb-GGUF": "embedding"}
    assert {name: purpose for name, purpose in purposes.items() if purpose != "chat"} == expected
    assert main(["list"]) == 0
    printed = capsys.readouterr()
    assert next(line for line in printed.out.splitlines() if "org/base " in line).endswith("qwen3, base model")
    assert "2 adapters: localllm adapters list shows them" in printed.err
    listing._checked.cache_clear()
    assert {ref.id: ref.purpose for ref in listing.listed()}["org/base-GGUF"] == "base", "the facts are remembered"


def test_pooling_that_is_not_computed_makes_no_embedding_model_of_a_chat_model() -> None:
    template = {"default": "x"}
    assert purpose_of(template, Pooling(8, problem="mean pooling")) == "chat"
    assert purpose_of({}, Pooling(8, problem="mean pooling")) == "embedding"
    assert purpose_of(template, Pooling(8)) == "embedding"
    assert purpose_of(template, None, headless=True) == "embedding"


def test_command_of_a_path_with_a_space_can_be_copied() -> None:
    with pytest.raises(WrongKind) as refused:
        check_use("/models/a model", "base", "chat")
    assert "localllm run '/models/a model' " in refused.value.hint
