"""Every request that the store sends: its address and its headers. The store sends nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from email.utils import formatdate

import pytest

from localllm.app import paths
from localllm.app.cli import main
from localllm.app.store import resolved
from localllm.app.store.hub import lookup, metadata, searching
from localllm.app.store.names import HubName
from localllm.app.store.transfer import failures
from localllm.app.store.transfer.leftovers import partials
from localllm.app.store.transfer.policy import Policy
from localllm.app.version import VERSION

from ...hub import Hub, Request, adapter_files, model_files, serving

AGENT = f"localllm/{VERSION}"
ALLOWED = {"Host", "Accept", "Accept-Encoding", "Connection", "User-Agent", "Range", "Authorization"}
INFO = "/api/models/org/m/revision/main"
FILES = {f"/org/m/resolve/{{commit}}/{name}" for name in model_files()} | {"/content/org/m/model.safetensors"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(Hub({"org/m": model_files(), "org/a": adapter_files()})) as hub:
        use(hub, monkeypatch)
        yield hub


def use(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("AI_AGENT", "some-agent")  # huggingface_hub would tell the hub


def requested(hub: Hub, *args: str) -> set[str]:
    """The addresses that a command requests, without the commit. Each request has the headers of localllm only."""
    hub.log.clear()
    hub.headers.clear()
    assert main(list(args)) == 0, args
    for headers in hub.headers:
        assert headers["User-Agent"] == AGENT, args
        assert set(headers) <= ALLOWED, args
        assert headers["Accept"] == "*/*"
        assert headers["Accept-Encoding"] == "identity"
    assert {method for method, _ in hub.log} <= {"GET"}
    commit = hub.commit("org/m", "main") or ""
    return {path.replace(commit, "{commit}") for _, path in hub.log}


def test_list_of_all_requests(hub: Hub) -> None:
    assert requested(hub, "search", "m") == {"/api/models"}
    small = {f"/org/m/resolve/{{commit}}/{name}" for name in ("config.json", "README.md", "model.safetensors")}
    header = small | {"/content/org/m/model.safetensors"}
    assert requested(hub, "inspect", "org/m") == {INFO} | header
    assert requested(hub, "fit", "org/m", "--backend", "cpu") == {INFO} | header
    assert requested(hub, "pull", "org/m", "--yes") == {INFO} | FILES
    assert requested(hub, "pull", "org/m", "--yes") == {INFO}, "complete"
    blob = resolved.model("org/m").path / "tokenizer.json"
    blob.resolve().unlink()
    assert requested(hub, "pull", "org/m", "--yes") == {INFO, "/org/m/resolve/{commit}/tokenizer.json"}, "continued"
    assert {path.split("/")[1] for path in requested(hub, "pull", "org/a", "--yes")} == {"api", "org", "content"}
    assert requested(hub, "pull", "ms:org/m", "--yes") == {
        "/api/v1/models/org/m/repo/files",
        *(f"/models/org/m/resolve/master/{name}" for name in model_files()),
    }


@pytest.mark.parametrize(
    "command",
    [
        ("search",),
        ("search", "m", "--offline"),
        ("list",),
        ("show", "org/m"),
        ("inspect", "org/m"),
        ("verify", "org/m"),
        ("verify",),
        ("import", "{model}", "--name", "copy"),
        ("alias", "mine", "org/m"),
        ("adapters", "list"),
        ("prune", "--dry-run"),
        ("rm", "org/m", "--yes"),
    ],
    ids=" ".join,
)
def test_commands_on_this_machine_send_no_request(hub: Hub, command: tuple[str, ...]) -> None:
    assert main(["pull", "org/m", "--yes"]) == 0
    assert requested(hub, *(word.format(model=resolved.model("org/m").path) for word in command)) == set()


def test_token_goes_to_its_hub_and_to_no_other(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret\n")
    hub.token = "hf_secret"
    assert requested(hub, "pull", "org/m", "--yes") == {INFO} | FILES
    assert hub.leaked == []
    assert {headers.get("Authorization") for headers in hub.headers} == {"Bearer hf_secret", None}
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:9,{hub.url}")
    requested(hub, "search", "m")
    assert {headers.get("Authorization") for headers in hub.headers} == {None}, "a mirror"
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    requested(hub, "search", "m")
    assert {headers.get("Authorization") for headers in hub.headers} == {None}


def test_redirect_of_metadata_is_followed_without_the_token_and_without_cookies(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    targets: list[dict[str, str]] = []

    def redirect(request: Request) -> bool:
        if request.handler.headers["Host"] == hub.content_url.removeprefix("http://"):
            targets.append(dict(request.handler.headers.items()))
            return False
        headers = {"Location": hub.content_url + request.path, "Set-Cookie": "id=tracked"}
        request.handler.reply(307, b"", headers)
        return True

    hub.fault = redirect
    searching.search_hub("m", 3)
    lookup.lookup(HubName("org/m"))
    lookup.lookup(HubName("org/m", hub="ms"))
    assert len(targets) == 4
    assert {header for headers in targets for header in headers} <= ALLOWED - {"Authorization"}


def test_search_and_lookup_need_no_huggingface_hub(hub: Hub) -> None:
    """The import of huggingface_hub takes longer than the requests."""
    code = (
        "import sys; from localllm.app.cli import main; main(['search', 'm']); print('huggingface_hub' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines()[-1] == "False", done


ODD = {
    "list": b'["x"]',
    "dictionary": b'{"a": 1}',
    "html": b"<html>please log in</html>",
    "empty": b"",
    "text": b'"x"',
    "null": b"null",
    "list of lists": b"[[]]",
    "list of null": b"[null]",
    "cut": b'{"sha": "',
    "deep": b"[" * 200_000,
    "long number": b"9" * 10_000,
    "no text": b"\xff\xfe\x00",
    "surrogate": b'[{"id": "\\ud800/m"}]',
    "wrong types": b'{"sha": 5, "siblings": [{"rfilename": 7, "size": -1}], "Code": "200"}',
    "dictionary of files": json.dumps({"sha": "a" * 40, "siblings": {"x": 1}, "Code": 200, "Data": []}).encode(),
    "null file": json.dumps({"sha": "a" * 40, "siblings": [None], "Code": 200, "Data": {"Files": [None]}}).encode(),
    "other id": b'[{"id": 5, "tags": "x", "safetensors": [], "siblings": {}}]',
    "huge": b'"' + b"x" * 3_000_000 + b'"',
}


@pytest.fixture(scope="module")
def odd() -> Iterator[Hub]:
    with serving(Hub({"org/m": model_files()})) as hub:
        yield hub


COMMANDS = ["search org/m", "inspect org/m", "fit org/m", "pull --yes org/m", "pull --yes ms:org/m"]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("reply", ODD)
def test_odd_reply_is_one_error_and_leaves_nothing(
    reply: str, command: str, odd: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(odd, monkeypatch)
    monkeypatch.setattr(metadata, "sleep", lambda _: None)
    monkeypatch.setattr(metadata, "MAX_REPLY", 2**21)
    odd.fault = lambda request: request.handler.reply(200, ODD[reply]) is None
    code = main(command.split())
    printed = capsys.readouterr()
    if (command, reply) == ("search org/m", "surrogate"):
        assert code == 0, "one name of many that pull refuses"
        return
    assert (code, printed.out) == (10, ""), printed
    [error, hint] = printed.err.splitlines()
    assert error.startswith("error: cannot "), printed
    assert hint.startswith("hint: ")
    assert not paths.hub_cache_dir().exists()


@pytest.mark.parametrize("command", ["search org/m", "pull --yes org/m"])
def test_odd_reply_is_not_kept(odd: Hub, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    use(odd, monkeypatch)
    monkeypatch.setattr(metadata, "sleep", lambda _: None)
    odd.fault = lambda request: request.handler.reply(200, b'["x"]') is None
    assert main(command.split()) == 10
    odd.fault = None
    assert main(command.split()) == 0


class Waits(list[float]):
    """The seconds of each wait, in place of `sleep`."""

    def __call__(self, seconds: float) -> None:
        self.append(seconds)


@pytest.mark.parametrize(
    ("status", "value", "seconds"),
    [(429, "7", 7), (503, "7", 7), (429, "240", 240), (503, "Wed, 21 Oct 2015 07:28:00 GMT", 0.5), (429, "soon", 0.5)],
)
def test_metadata_obeys_retry_after(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, status: int, value: str, seconds: float
) -> None:
    waits = Waits()
    monkeypatch.setattr(metadata, "sleep", waits)
    answers = iter([status])

    def overloaded(request: Request) -> bool:
        for code in answers:
            request.handler.reply(code, b"", {"Retry-After": value})
            return True
        return False

    hub.fault = overloaded
    assert lookup.lookup(HubName("org/m"), Policy()).files
    assert len(waits) == 1
    assert seconds * 0.5 <= waits[0] <= seconds


def test_rate_limit_of_hugging_face_is_obeyed(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Waits()
    monkeypatch.setattr(metadata, "sleep", waits)
    statuses = iter([429, 503])
    limit = {"RateLimit": '"api";r=0;t=40'}
    hub.fault = lambda request: any(request.handler.reply(status, b"", limit) is None for status in statuses)
    assert lookup.lookup(HubName("org/m"), Policy()).files
    assert waits[0] == 40
    assert waits[1] <= 1, "only a reply about too many requests"


def test_date_of_retry_after_is_obeyed(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Waits()
    monkeypatch.setattr(metadata, "sleep", waits)
    monkeypatch.setattr(failures.time, "time", lambda: 1_790_000_000.0)
    moment = formatdate(1_790_000_100.0, usegmt=True)
    statuses = iter([429])

    def overloaded(request: Request) -> bool:
        return any(request.handler.reply(status, b"", {"Retry-After": moment}) is None for status in statuses)

    hub.fault = overloaded
    assert lookup.lookup(HubName("org/m"), Policy()).files
    assert waits[0] == pytest.approx(100)


@pytest.mark.parametrize(
    ("command", "asked"), [("search m", "6"), ("pull --yes org/m", "301"), ("inspect ms:org/m", "999999")]
)
def test_longer_wait_is_an_error_that_names_it(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, asked: str
) -> None:
    waits = Waits()
    monkeypatch.setattr(metadata, "sleep", waits)

    def overloaded(request: Request) -> bool:
        request.handler.reply(429, b"", {"Retry-After": asked})
        return True

    hub.fault = overloaded
    assert main(command.split()) == 10
    assert f"asks to wait {asked} s" in capsys.readouterr().err
    assert waits == []
    assert not paths.hub_cache_dir().exists()
    assert partials(paths.hub_cache_dir()) == []
