"""Output and exit codes of the commands, with a fake client instead of a daemon."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from msgspec import structs
from tokenizers import Tokenizer

from localllm.app import config, paths
from localllm.app.cli import main
from localllm.app.client import AdapterEntry, Done, LoadedModel, LoadFlags, ReasoningPiece, TextPiece, ToolCall, Usage
from localllm.app.commands import bench, chat, console, daemon, models, removal, run, selftest, session, settings
from localllm.app.config import Settings
from localllm.app.errors import AppError, ContextTooLong, DaemonUnreachable, InvalidRequest, ModelNotFound
from localllm.app.store import listing, preferences
from localllm.app.store.records import ListedModel
from localllm.backends.pytorch.product_check import ProductResult

from .tiny_qwen import write_model

READY = LoadedModel(id="m", state="ready", pid=7, backend="b", device="d", dtype="float32", options=("--quant int8",))


def done(finish: str = "stop", **usage: int) -> Done:
    counts = {"prompt_tokens": 8, "completion_tokens": 5, "cached_tokens": 2} | usage
    return Done(finish=finish, usage=Usage(**counts), ttft=1.0, seconds=3.0)


class FakeClient:
    """A client that answers every question with the same events, and stores the questions."""

    def __init__(self, *events: Any, models: list[LoadedModel] | None = None) -> None:
        self.events = events
        self.requests: list[Any] = []
        self.models = models or []
        self.ready = READY

    async def chat(self, model: str, messages: list[dict[str, Any]], **body: Any) -> AsyncIterator[Any]:
        self.requests.append((model, [dict(message) for message in messages], body))
        for event in self.events:
            yield event

    async def complete(self, model: str, prompt: str, **body: Any) -> AsyncIterator[Any]:
        self.requests.append((model, prompt, body))
        for event in self.events:
            yield event

    async def load(self, model: str, **how: Any) -> LoadedModel:
        self.requests.append((model, how))
        return self.ready

    async def loaded(self) -> list[LoadedModel]:
        return self.models

    async def unload(self, model: str) -> None:
        self.requests.append(model)

    async def shutdown(self) -> None:
        self.requests.append("shutdown")

    async def __aenter__(self) -> FakeClient:
        return self

    async def __aexit__(self, *_: object) -> None: ...


@asynccontextmanager
async def connected(client: FakeClient) -> AsyncIterator[Any]:
    yield client


EVENTS = [ReasoningPiece("hm"), TextPiece("a\x1b"), ToolCall(id="c", name="f", arguments="{}"), TextPiece("b")]


@pytest.mark.parametrize("finish", ["stop", "length"])
async def test_stream_prints_each_event(capsys: pytest.CaptureFixture[str], finish: str) -> None:
    client: Any = FakeClient(*EVENTS, done(finish))
    assert await run.stream(client.chat("m", [])) == "a\x1bb"
    printed = capsys.readouterr()
    assert printed.out == "a\x1bf({})b\n"
    assert printed.err.startswith("hm\n\n"), "an empty line separates the answer from the reasoning"
    assert ("--max-tokens" in printed.err) is (finish == "length")


async def test_run_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    await run._run(connected(FakeClient(*EVENTS, done())), "m", (None, "x"), {}, True)  # type: ignore[arg-type]
    assert json.loads(capsys.readouterr().out) == {
        "model": "m",
        "text": "a\x1bb",
        "reasoning": "hm",
        "tool_calls": [{"id": "c", "name": "f", "arguments": "{}"}],
        "finish": "stop",
        "usage": {"prompt_tokens": 8, "completion_tokens": 5, "cached_tokens": 2},
        "timings": {"ttft": 1.0, "seconds": 3.0, "tokens_per_second": 2.0},
    }


@pytest.mark.parametrize("as_json", [False, True])
async def test_run_completes_text_with_a_base_model(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    client = FakeClient(TextPiece("b"), done())
    client.ready = structs.replace(READY, purpose="base")
    await run._run(connected(client), "alias", (None, "a"), {"top_k": 1}, as_json)  # type: ignore[arg-type]
    assert client.requests[1:] == [("m", "a", {"max_tokens": run.COMPLETION_TOKENS, "top_k": 1})]
    printed = capsys.readouterr()
    assert "m is a base model: it completes the text" in printed.err
    assert (json.loads(printed.out)["text"] if as_json else printed.out.strip()) == "b"
    with pytest.raises(InvalidRequest, match="has no system message"):
        await run._run(connected(client), "m", ("be brief", "a"), {}, as_json)  # type: ignore[arg-type]


def test_constraint_from_schema_or_regex() -> None:
    def file(text: bytes) -> Any:
        stream = io.BytesIO(text)
        stream.name = "s.json"
        return stream

    assert run._constraint(None, None) == {}
    assert run._constraint(None, "a+") == {"regex": "a+"}
    for schema in (b'{"a": 1}', b'\xef\xbb\xbf{"a": 1}\r\n'):
        assert run._constraint(file(schema), None)["response_format"]["json_schema"]["schema"] == {"a": 1}
    for schema, regex, words in (
        (b"{}", "a", "only one of"),
        (b"{", None, "s.json is not JSON"),
        (b"\xff", None, "byte 0"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            run._constraint(file(schema), regex)


class Piped:
    """Standard input as a pipe or a terminal."""

    def __init__(self, data: bytes = b"", *, terminal: bool = False) -> None:
        self.buffer = io.BytesIO(data)
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize(
    ("argument", "piped", "joined", "has_notice"),
    [
        ("a", b"\nb\n\n", "a\n\nb", True),
        ("a", b"", "a", False),
        (None, b"b\n", "b", False),
        (None, b" \n", "", False),
        (None, b"", "", False),
        (None, b"\xef\xbb\xbfb\r\n", "b", False),
        (None, b"b\r\nc\r\n\r\n", "b\r\nc", False),
        ("\ufeffa\r", b"\xef\xbb\xbfb\r", "a\n\nb", True),
    ],
)
def test_prompt_joins_argument_and_standard_input(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argument: str | None,
    piped: bytes,
    joined: str,
    has_notice: bool,
) -> None:
    monkeypatch.setattr(run.sys, "stdin", Piped(piped))
    if joined:
        assert run._prompt(argument) == joined
    else:
        with pytest.raises(InvalidRequest, match="no prompt"):
            run._prompt(argument)
    assert ("includes standard input" in capsys.readouterr().err) is has_notice
    monkeypatch.setattr(run.sys, "stdin", Piped(b"never read", terminal=True))
    assert run._prompt("a") == "a"


def test_chat_answers_each_line_of_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = FakeClient(TextPiece("yes"), done())
    monkeypatch.setattr(chat.sys, "stdin", Piped(b"one\n\n  two \n"))
    chat._lines(connected(client), "m", session.system_messages("be brief"), {"top_k": 1})  # type: ignore[arg-type]
    system, answer = {"role": "system", "content": "be brief"}, {"role": "assistant", "content": "yes"}
    turns = [{"role": "user", "content": text} for text in ("one", "two")]
    assert client.requests == [
        ("m", [system, turns[0]], {"top_k": 1}),
        ("m", [system, turns[0], answer, turns[1]], {"top_k": 1}),
    ]
    assert capsys.readouterr().out == "yes\nyes\n"
    assert session.system_messages(None) == session.system_messages("") == []
    assert session.system_messages("\ufeffs\r")[0]["content"] == "s"
    client.requests.clear()
    monkeypatch.setattr(chat.sys, "stdin", Piped(b"\xef\xbb\xbfone\r\n\r\n"))
    chat._lines(connected(client), "m", [], {})  # type: ignore[arg-type]
    assert [messages for _, messages, _ in client.requests] == [[turns[0]]]
    monkeypatch.setattr(chat.sys, "stdin", Piped("one".encode("utf-16")))
    with pytest.raises(InvalidRequest, match="line 1 of standard input is not UTF-8 text, but UTF-16"):
        chat._lines(connected(client), "m", [], {})  # type: ignore[arg-type]
    monkeypatch.setattr(chat.sys, "stdin", Piped(b"one\n\xff\n"))
    with pytest.raises(InvalidRequest, match="line 2 of standard input"):
        chat._lines(connected(client), "m", [], {})  # type: ignore[arg-type]


def test_parameters_are_the_flags_that_are_set() -> None:
    flags = {"system": "s", "temperature": 0.0, "top_k": None, "stop": ("a", "b"), "seed": 0}
    assert session.parameters(flags) == {"temperature": 0.0, "stop": ["a", "b"], "seed": 0}
    assert session.parameters({"stop": ()}) == {}
    assert settings.without_unset({"port": 0, "host": "", "allowed_hosts": (), "idle_unload": None}) == {
        "port": 0,
        "host": "",
    }


@pytest.mark.parametrize(
    ("previous", "changes", "notice"),
    [
        ([], {"options": ()}, ""),
        ([], {}, "loaded m with --quant int8"),
        ([READY], {}, ""),
        ([structs.replace(READY, pid=6)], {}, "loaded m again, with --quant int8: an earlier call used other options"),
        ([structs.replace(READY, pid=6)], {"options": ()}, "loaded m again, with the settings of the daemon: an"),
        ([READY], {"kept": True}, "m is busy and stays loaded with --quant int8"),
    ],
)
async def test_loaded_client_tells_the_flags_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    previous: list[LoadedModel],
    changes: dict[str, Any],
    notice: str,
) -> None:
    client = FakeClient(models=previous)
    client.ready = structs.replace(READY, **changes)

    async def connect(*_: Any, **__: Any) -> FakeClient:
        return client

    monkeypatch.setattr(session.Client, "connect", connect)
    flags = LoadFlags(backend="cpu", quant="int8", context=64)
    async with session.loaded_client(Settings(), "m", flags) as opened:
        assert opened is client  # type: ignore[comparison-overlap]
    assert client.requests == [("m", {"flags": flags, "exact": True, "for_chat": False})]
    err = capsys.readouterr().err
    assert err.startswith(notice)
    assert bool(err) is bool(notice)


@pytest.mark.parametrize(("previous", "said"), [([], "slow\nodd\n"), ([READY], "")])
async def test_loaded_client_prints_the_warnings_of_a_new_load(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], previous: list[LoadedModel], said: str
) -> None:
    client = FakeClient(models=previous)
    client.ready = structs.replace(READY, options=(), warnings=("slow", "odd"))

    async def connect(*_: Any, **__: Any) -> FakeClient:
        return client

    monkeypatch.setattr(session.Client, "connect", connect)
    async with session.loaded_client(Settings(), "m", LoadFlags()):
        pass
    assert capsys.readouterr().err == said


def connecting(monkeypatch: pytest.MonkeyPatch, client: FakeClient | None) -> None:
    async def connect(settings: Settings, *, start: bool) -> FakeClient:
        assert not start
        if client is None:
            raise DaemonUnreachable("none")
        return client

    monkeypatch.setattr(daemon.Client, "connect", connect)


def test_ps_prints_loaded_models(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    idle = LoadedModel(
        id="a",
        state="ready",
        pid=7,
        backend="cpu",
        dtype="float32",
        quant="int8",
        context=64,
        memory=2048,
        unload_in=9.4,
    )
    busy = LoadedModel(id="b", state="ready", pid=8, requests=2, unload_in=9.0)
    coming = LoadedModel(id="c", state="loading", pid=9)
    connecting(monkeypatch, FakeClient(models=[idle, busy, coming]))
    assert daemon.ps(False) == 0
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells[0] == ["MODEL", "STATE", "BACKEND", "CONTEXT", "MEMORY", "BUSY", "UNLOADS IN"]
    assert cells[1:] == [
        ["a", "ready", "cpu float32 int8", "64", "2.0 KiB", "0", "9 s"],
        ["b", "ready", "2"],
        ["c", "loading", "0", "never"],
    ]
    assert daemon.ps(True) == 0
    assert [model["id"] for model in json.loads(capsys.readouterr().out)] == ["a", "b", "c"]
    for client, words in ((FakeClient(), "no model is loaded"), (None, "no daemon is running")):
        connecting(monkeypatch, client)
        assert daemon.ps(False) == 0
        printed = capsys.readouterr()
        assert (printed.out, words in printed.err) == ("", True)
        daemon.ps(True)
        assert json.loads(capsys.readouterr().out) == []


def test_stop_unloads_a_model_or_stops_the_daemon(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = FakeClient()
    connecting(monkeypatch, client)
    assert (daemon.stop("m"), daemon.stop(None)) == (0, 0)
    assert client.requests == ["m", "shutdown"]
    assert capsys.readouterr().err == "unloaded m\nstopped the daemon\n"
    connecting(monkeypatch, None)
    assert daemon.stop("m") == 0
    assert capsys.readouterr().err == "no daemon is running\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_every_error_has_its_exit_code(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    args = ["--json"] if as_json else []

    def code(error: BaseException) -> int:
        def fail(**_: Any) -> None:
            raise error

        command = click.Command("x", callback=fail, params=[click.Option(["--json"], is_flag=True)])
        return console.run_command(command, args)

    expected = {"message": "too\nlong", "type": "invalid_request_error", "code": "context_length_exceeded", "hint": "h"}
    assert code(ContextTooLong("too\nlong", hint="h", n_ctx=4)) == 2
    printed = capsys.readouterr()
    if as_json:
        assert json.loads(printed.err) == {"error": expected | {"n_ctx": 4}}
    else:
        assert printed.err == "error: too long\nhint: h\n"
    assert printed.out == ""
    assert code(ModelNotFound("m\x1b")) == 3
    assert "\x1b" not in capsys.readouterr().err
    assert code(click.Abort()) == 130
    assert capsys.readouterr().err == ""
    assert code(OSError("disk")) == 11
    assert code(click.FileError("f")) == 2
    with pytest.raises(RuntimeError):
        code(RuntimeError("a bug"))
    for value, expected in ((None, 0), (4, 4), ("x", 0)):
        assert console.run_command(click.Command("x", callback=lambda value=value: value), []) == expected


def test_safe_replaces_control_characters() -> None:
    shown = console.safe("".join(map(chr, range(256))))
    unchanged = [chr(code) for code in range(256) if code in (9, 10) or 32 <= code < 127 or code >= 160]
    assert [char for char in shown if char != "\ufffd"] == unchanged
    assert len(shown) == 256


def test_tables_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    console.table(("A", "LONG", "C"), [("aaa", "b", ""), ("", "bbbbbb", "c")])
    assert capsys.readouterr().out == "A    LONG    C\naaa  b\n     bbbbbb  c\n"


@pytest.mark.parametrize("packed", [0, 2048])
def test_list_prints_the_models(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], packed: int
) -> None:
    available = [
        ListedModel(id="guide", bundled=True, size=10, context=64),
        ListedModel(id="org/m", size=20, packed=packed, revision="c"),
    ]
    monkeypatch.setattr(listing, "listed", lambda wait: available)
    assert models.list_models(False) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[1].split() == ["guide", "10", "B", "64"]
    assert printed.out.splitlines()[2].split() == ["org/m", "20", "B", *(["2.0", "KiB"] if packed else []), "?"]
    assert ("PACKED" in printed.out.splitlines()[0], "rm --packed" in printed.err) == (bool(packed), bool(packed))
    assert "localllm pull" not in printed.err
    models.list_models(True)
    (_, entry) = json.loads(capsys.readouterr().out)
    assert (entry["id"], entry["size"], entry["packed"], entry["bundled"], entry["revision"]) == (
        "org/m",
        20,
        packed,
        False,
        "c",
    )
    del available[1]
    models.list_models(False)
    assert "localllm pull" in capsys.readouterr().err


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("yes", "terminal", "agrees", "code"), [
    (True, False, False, 0), (False, True, True, 0), (False, True, False, 1), (False, False, True, None),
])  # fmt: skip
def test_rm_deletes_nothing_without_confirmation(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    packed: bool,
    yes: bool,
    terminal: bool,
    agrees: bool,
    code: int | None,
) -> None:
    from localllm.app.store.changes import deletion

    deleted: list[str] = []
    for kind in ("plan_packed_removal", "plan_removal"):
        plan = deletion.Removal("m", 10, lambda kind=kind: deleted.append(kind))
        monkeypatch.setattr(deletion, kind, lambda name, plan=plan: plan)
    monkeypatch.setattr(removal.sys, "stdin", Piped(terminal=terminal))
    monkeypatch.setattr(removal.click, "confirm", lambda *_, **__: agrees)
    if code is None:
        with pytest.raises(InvalidRequest) as refused:
            models.remove("m", packed, yes, False)
        assert refused.value.hint == "add --yes to delete without confirmation"
    else:
        assert models.remove("m", packed, yes, False) == code
    assert deleted == (["plan_packed_removal" if packed else "plan_removal"] if code == 0 else [])
    assert ("deleted nothing" in capsys.readouterr().err) is (code == 1)


@pytest.mark.parametrize(
    ("aliases", "title"),
    [((), "m"), (("a",), "m with its alias a"), (("a", "b"), "m with its aliases a, b")],
)
def test_rm_names_the_aliases_that_it_removes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], aliases: tuple[str, ...], title: str
) -> None:
    from localllm.app.store.changes import deletion

    plan = deletion.Removal("m", 10, lambda: None, aliases=aliases)
    monkeypatch.setattr(deletion, "plan_removal", lambda name: plan)
    monkeypatch.setattr(removal.sys, "stdin", Piped(terminal=True))
    questions: list[str] = []
    monkeypatch.setattr(removal.click, "confirm", lambda text, **_: questions.append(text) or True)
    assert models.remove("m", False, False, False) == 0
    assert questions == [f"Delete {title} and free 10 B?"]
    assert capsys.readouterr().err == f"deleted {title}; freed 10 B\n"
    assert models.remove("m", False, True, True) == 0
    assert json.loads(capsys.readouterr().out) == {
        "deleted": "m",
        "freed": 10,
        "aliases": [*aliases],
        "unloaded": [],
    }


@pytest.mark.parametrize("as_json", [False, True])
def test_rm_unloads_the_deleted_models_and_adapters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, as_json: bool
) -> None:
    from localllm.app.store.changes import deletion

    class Daemon(FakeClient):
        async def adapters(self) -> list[AdapterEntry]:
            paths = {"mine": tmp_path / "lora", "other": Path("/other")}
            return [
                AdapterEntry(id=0, name=name, model="guide", path=str(path), scale=0.0, pinned=False)
                for name, path in paths.items()
            ]

        async def unload_adapter(self, name: str, model: str) -> None:
            self.requests.append((name, model))

    (tmp_path / "model").mkdir()
    model = str(write_model(tmp_path / "model"))
    client = Daemon(models=[structs.replace(READY, id=model), structs.replace(READY, id="guide")])
    connecting(monkeypatch, client)
    order: list[str] = []
    plan = deletion.Removal("m", 10, lambda: order.extend(map(str, client.requests)), folders=(tmp_path,))
    monkeypatch.setattr(deletion, "plan_removal", lambda name: plan)
    assert models.remove("m", False, True, as_json) == 0
    assert client.requests == [("mine", "guide"), model]
    assert len(order) == 2, "the files are deleted after the unload"
    printed = capsys.readouterr()
    assert f"{model} is loaded; the deletion unloads it\nguide:mine is loaded" in printed.err
    assert not as_json or json.loads(printed.out)["unloaded"] == [model, "guide:mine"]


def test_config_hides_the_api_key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LOCALLLM_API_KEY", "secret")
    monkeypatch.setenv("LOCALLLM_ALLOWED_HOSTS", "a,b")
    for as_json in (False, True):
        assert settings.config(None, (), as_json) == 0
        printed = capsys.readouterr().out
        assert "secret" not in printed
        assert "(set, hidden)" in printed
    entries = {entry["name"]: entry for entry in json.loads(printed)["settings"]}
    assert entries["allowed_hosts"]["value"] == ["a", "b"]
    assert (entries["allowed_hosts"]["from"], entries["port"]["from"]) == ("LOCALLLM_ALLOWED_HOSTS", "default")
    assert "model" in entries
    monkeypatch.delenv("LOCALLLM_API_KEY")
    settings.config(None, (), False)
    printed = capsys.readouterr().out
    assert "hidden" not in printed
    assert "a, b" in printed
    assert "does not exist" in printed


def test_serve_flags_have_types_and_defaults() -> None:
    flags = {flag.name: flag for flag in settings.flags()}
    assert "model" not in flags
    assert isinstance(flags["quant"].type, click.Choice)
    assert (flags["port"].type.name, flags["idle_unload"].type.name, flags["host"].type.name) == (
        "integer",
        "float",
        "text",
    )
    assert flags["allowed_hosts"].multiple
    assert not flags["host"].multiple
    assert "[default: 11811]" in str(flags["port"].help)  # type: ignore[attr-defined]
    assert "default" not in str(flags["api_key"].help)  # type: ignore[attr-defined]


async def test_selftest_compares_known_answers() -> None:
    assert selftest._same("n", ["a ", "b"], ["a", "b"]) == selftest.Check("n", True, "2 answers")
    wrong = selftest._same("n", ["a", "x", "y"], ["a", "b", "c"])
    assert (wrong.ok, wrong.details) == (False, "2 of 3 differ; the first is 'x', expected 'b'")
    with pytest.raises(ValueError, match="longer"):
        selftest._same("n", ["a"], ["a", "b"])
    for reused, text, ok in ((2, "yes", True), (0, "yes", False), (2, "no", False)):
        self_test: Any = selftest._Chat(FakeClient(TextPiece(text), done(cached_tokens=reused)))  # type: ignore[arg-type]
        check = await selftest._prefix(self_test, "p", "yes", [], {})
        assert check.ok is ok
        assert f"{reused} of 8 tokens reused" in check.details


async def test_selftest_asks_for_the_prefix_cache_with_more_tokens_than_a_page() -> None:
    """An NPU has pages of 128 tokens, and only whole pages are reused."""
    entries = json.loads((paths.guide_dir() / "answers.json").read_text("utf-8"))
    client: Any = FakeClient(TextPiece("yes"), done())
    await selftest._prefix(
        selftest._Chat(client), "p", "yes", selftest.conversation(entries[1 : 1 + selftest.EARLIER]), {}
    )
    tokenizer = Tokenizer.from_file(str(paths.guide_dir() / "tokenizer.json"))
    for request in client.requests:
        assert sum(len(tokenizer.encode(message["content"]).ids) for message in request[1][:-1]) > 128
    assert len(client.requests) == 2


@pytest.mark.parametrize(
    ("text", "ok"), [('{"n": 7}', True), ('{"n": "7"}', False), ("{", False), ("[]", False), ("{}", False)]
)
async def test_selftest_checks_an_answer_with_a_schema(text: str, ok: bool) -> None:
    client: Any = FakeClient(TextPiece(text), done())
    check = await selftest._schema(selftest._Chat(client))
    assert (check.ok, bool(check.details)) == (ok, not ok)
    assert client.requests[0][2]["response_format"]["json_schema"]["strict"]


def test_selftest_reports_products_with_their_durations() -> None:
    product = ProductResult("linear.int4", "", {1: 0.0000215, 64: 0.001}, weight_bytes=10**7)
    right = selftest._product_check(product, None)
    assert right.line == "  ok      linear.int4: 1 row 0.022 ms, 64 rows 1.000 ms"
    shares = selftest._product_check(product, 5e11)
    assert shares.details == ("1 row 0.022 ms (93% of the bandwidth), 64 rows 1.000 ms (2% of the bandwidth)")
    wrong = selftest._product_check(ProductResult("linear.int4", "2 rows: returns NaN", {1: 0.001}), None)
    assert wrong.line == "  FAILED  linear.int4: 2 rows: returns NaN, 1 row 1.000 ms"


@pytest.mark.parametrize("ok", [False, True])
@pytest.mark.parametrize("as_json", [False, True])
def test_selftest_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ok: bool, as_json: bool
) -> None:
    async def report(flags: LoadFlags) -> selftest.Report:
        checks = [selftest.Check("one", True), selftest.Check("two", ok, "why")]
        return selftest.Report("1", "here", "cpu", "d", {"f": "v"}, "float32", "", ("slow",), checks)

    monkeypatch.setattr(selftest, "_selftest", report)
    assert selftest.selftest({}, as_json) == (0 if ok else 1)
    printed = capsys.readouterr().out
    if as_json:
        assert json.loads(printed)["ok"] is ok
    else:
        assert f"  {'ok    ' if ok else 'FAILED'}  two: why\n" in printed
        assert "  f: v\n" in printed
        assert "  warning: slow\n" in printed
        assert ("all checks passed" in printed) is ok


async def test_answer_without_a_final_event_is_an_error() -> None:
    client: Any = FakeClient(TextPiece("a"))
    with pytest.raises(AppError):
        await selftest._Chat(client).ask("x")
    with pytest.raises(AppError):
        await bench._answer(client, "m", "x", 3)
    text, last = await selftest._Chat(FakeClient(TextPiece("a"), TextPiece("b"), done())).ask("x")  # type: ignore[arg-type]
    assert (text, last) == ("ab", done())


def test_bench_gives_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results are medians of three rounds, without the warm-up."""
    client = FakeClient(done())
    monkeypatch.setattr(bench, "load", lambda _: SimpleNamespace(read_bandwidth=lambda: None))
    result = asyncio.run(bench._bench(connected(client), "m", 3, (1, 4)))  # type: ignore[arg-type]
    assert (result.prompt_tokens, result.ttft_ms, result.prefill, result.decode) == (8, 1000.0, 6.0, 2.0)
    assert result.throughput == {1: 2.0, 4: 8.0}
    assert (result.memory_gbps, result.memory_share, result.rounds) == (None, None, 3)
    prompts = [prompt for _, prompt, _ in client.requests[1:]]
    assert len(prompts) == len(set(prompts)) == 2 + 3 * (1 + 1 + 1 + 4)
    long = [body["max_tokens"] for _, prompt, body in client.requests[1:] if len(prompt.split()) == bench.LONG]
    assert long == [1, 1, 1], "prefill is measured with one token"
    assert {body["max_tokens"] for _, prompt, body in client.requests[1:] if len(prompt.split()) == bench.SHORT} == {96}
    assert all(body["ignore_eos"] and body["temperature"] == 0 for _, _, body in client.requests[1:])


@pytest.mark.parametrize("context", [0, 40, 64, 128, 256, 512, 4096])
@pytest.mark.parametrize("word_tokens", [1.0, 1.5, 7.0])
def test_bench_fits_the_context(context: int, word_tokens: float) -> None:
    sizes = bench._sizes(context, word_tokens)
    assert sizes.long >= sizes.short >= 1
    assert sizes.new_tokens > 1
    if context:
        assert sizes.long * word_tokens + 1 <= context
        assert sizes.short * word_tokens + sizes.new_tokens <= context
    if context in (0, 4096):
        assert sizes == bench.Sizes()


def test_bench_refuses_a_context_without_room_for_a_prompt() -> None:
    with pytest.raises(InvalidRequest, match="context of 8 tokens is too short"):
        bench._sizes(8, 7.0)


def test_bench_computes_the_share_of_the_read_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LoadedModel(id="m", state="ready", pid=7, token_bytes=10)
    for speed, figures in ((None, (None, None)), (4e9, (4.0, 10 * 2.0 / 4e9))):
        monkeypatch.setattr(bench, "load", lambda _, speed=speed: SimpleNamespace(read_bandwidth=lambda: speed))
        assert bench._memory(model, 2.0) == figures
    assert bench._memory(READY, 2.0) == (None, None)
    late = Done(finish="length", usage=Usage(completion_tokens=11), ttft=2.0, seconds=7.0)
    assert bench._rate([done(), late]) == (4 + 10) / (7.0 - 1.0)


def test_notice_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    console.say("a.gguf\nerror: \x1b[31mx is damaged")
    assert capsys.readouterr().err == "a.gguf error: \N{REPLACEMENT CHARACTER}[31mx is damaged\n"


def test_config_changes_the_settings_of_one_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert settings.config("guide", ("quant=int8", "context=64"), False) == 0
    assert preferences.read().settings == {"guide": {"quant": "int8", "context": 64}}
    assert "when guide is loaded next" in capsys.readouterr().err
    settings.config(None, (), False)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["guide", "context=64", "quant=int8"] in [[*row[:1], *sorted(row[1:])] for row in rows]
    settings.config(None, (), True)
    assert json.loads(capsys.readouterr().out)["models"] == {"guide": {"quant": "int8", "context": 64}}
    settings.config("guide", ("quant=",), True)
    assert json.loads(capsys.readouterr().out)["settings"] == {"context": 64}
    settings.config("guide", ("context=",), False)
    assert "no settings of its own" in capsys.readouterr().err
    assert preferences.read().settings == {}


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        ("quant=int3", (), "Invalid enum value"),
        ("quant=int4", ("guide",), "'guide' is not NAME=VALUE"),
        ("prot=1", (), "unknown setting 'prot'"),
        ("port=99999", (), "port in"),
        ("quant=int4", ("port=x",), "port: expected a number"),
        ("backend=cdua", (), "unknown backend 'cdua'"),
        ("allowed_origins=https://*.example", (), "patterns are not supported"),
        ("self_test=off", (), "LOCALLLM_DEV_SELF_TEST"),
        ("guide", ("backend=cpuu",), "unknown backend"),
        ("prot=", (), "unknown setting 'prot'"),
        ("guide", ("prot=",), "unknown setting 'prot'"),
        ("guide", ("port=",), "a model has the settings"),
        ("guide", ("quant",), "is not NAME=VALUE"),
        ("guide", ("qant=int4",), "unknown setting"),
        ("guide", ("context=x",), "expected a number"),
        ("guide", ("context=-1",), "context in the settings of guide"),
        ("org/none", (), "not on this machine"),
    ],
)
def test_config_refuses_wrong_changes_and_writes_nothing(model: str, changes: tuple[str, ...], words: str) -> None:
    file = paths.config_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("port = 1\n")
    with pytest.raises(AppError) as refused:
        settings.config(model, changes, False)
    assert words in refused.value.message + refused.value.hint
    assert preferences.read().settings == {}
    assert file.read_text() == "port = 1\n"


def test_config_changes_the_settings_of_all_models(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert settings.config("quant=int8", ("port=8080", "preload=guide,org/a", "idle_unload=0.5"), False) == 0
    shown = capsys.readouterr()
    assert config.read_file(paths.config_file()) == {
        "quant": "int8",
        "port": 8080,
        "preload": ["guide", "org/a"],
        "idle_unload": 0.5,
    }
    assert [line.split()[:2] for line in shown.out.splitlines()[1:3]] == [["quant", "int8"], ["port", "8080"]]
    assert "localllm stop" in shown.err
    monkeypatch.setenv("LOCALLLM_PORT", "9")
    settings.config("port=7", ("quant=", "api_key=sesame"), True)
    shown = capsys.readouterr()
    assert json.loads(shown.out)["settings"] == {
        "port": 7,
        "preload": ["guide", "org/a"],
        "idle_unload": 0.5,
        "api_key": "(set, hidden)",
    }
    assert "LOCALLLM_PORT overrides port" in shown.err
    assert "sesame" not in shown.out + shown.err
    assert paths.config_file().stat().st_mode & 0o077 == 0, "only this user may read an API key"


def test_inspect_does_not_invent_the_rank_and_the_base_of_an_unreadable_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": "org/base"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    main(["inspect", str(tmp_path)])
    lines = {tuple(line.split()) for line in capsys.readouterr().out.splitlines()}
    assert lines >= {("base", "model", "unknown"), ("rank", "unknown")}


def test_rm_of_a_built_in_adapter_says_that_it_is_built_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rm", "pirate", "--yes"]) == InvalidRequest.exit_code
    assert "pirate is built in and cannot be deleted" in capsys.readouterr().err
