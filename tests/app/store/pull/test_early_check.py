"""An unusable model is refused before the download of its weights and leaves no files. Other unfinished downloads
are listed."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from localllm.app import paths
from localllm.app.cli import main
from localllm.app.store import listing, resolved
from localllm.app.store.changes import prune
from localllm.app.store.pull.download import Download
from localllm.app.store.transfer.leftovers import partials
from localllm.app.store.transfer.transfer import Cancelled

from ....engine.files.gguf_files import TINY, model
from ...hub import Hub, Request, adapter_files, commit_of, model_files, safetensors, serving

LARGE = 3_000_000  # bytes of the weights; a check reads only their header
WHOLE = model_files(LARGE)
ADAPTER = adapter_files()
NO_LORA = json.dumps({"peft_type": "LOHA", "r": 4}).encode()
PREFIXED = safetensors(LARGE).replace(b"model.norm.weight", b"bert_.norm.weight")
UNUSABLE: dict[str, tuple[str, dict[str, bytes], str]] = {
    "no tokenizer": ("org/m", {name: WHOLE[name] for name in WHOLE if name != "tokenizer.json"}, "tokenizer.json"),
    "broken tokenizer": ("org/m", {**WHOLE, "tokenizer.json": b'{"model": 5}'}, "tokenizer.json"),
    "unknown architecture": ("org/m", {**WHOLE, "config.json": b'{"model_type": "mamba2"}'}, "mamba2"),
    "malformed config": ("org/m", {**WHOLE, "config.json": b"[1"}, "config.json"),
    "other tensors": ("org/m", {**WHOLE, "model.safetensors": PREFIXED}, "model.norm.weight is missing"),
    "malformed header": ("org/m", {**WHOLE, "model.safetensors": b"\xff" * LARGE}, "model.safetensors"),
    "cut weights": ("org/m", {**WHOLE, "model.safetensors": WHOLE["model.safetensors"][:-5]}, "model.safetensors"),
    "other adapter": ("org/m", {**ADAPTER, "adapter_config.json": NO_LORA}, "LOHA"),
    "malformed adapter": ("org/m", {**ADAPTER, "adapter_model.safetensors": b"\xff" * LARGE}, "adapter_model"),
    "no GGUF": ("org/m:Q8_0", {"m-Q8_0.gguf": bytes(LARGE)}, "GGUF"),
    "cut GGUF": ("org/m:Q8_0", {"m-Q8_0.gguf": model(TINY)[:-90]}, "m-Q8_0.gguf"),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with serving(Hub({})) as hub:
        yield hub


@pytest.fixture
def hub(server: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    server.sent = 0
    server.revisions.clear()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    return server


@pytest.mark.parametrize("case", UNUSABLE)
def test_unusable_model_is_refused_before_its_weights(case: str, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    name, hub.repos["org/m"], words = UNUSABLE[case]
    assert main(["pull", "--yes", name]) == 5
    error = capsys.readouterr().err
    assert words in error
    assert "--anyway" in error
    assert hub.sent < 1_000_000
    assert not list(paths.hub_cache_dir().glob("models--*"))
    assert [row.id for row in listing.listed()] == ["guide"]


def test_refused_revision_leaves_the_old_one(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.repos["org/m"] = WHOLE
    assert main(["pull", "--yes", "org/m"]) == 0
    folder = resolved.model("org/m").path
    hub.repos["org/m"] = {**WHOLE, "config.json": b'{"model_type": "mamba2"}'}
    hub.revisions["org/m"] = {"main": commit_of("new")}
    assert main(["pull", "--yes", "org/m"]) == 5
    assert {file.name for file in folder.iterdir()} == set(WHOLE)
    assert all(file.read_bytes() == WHOLE[file.name] for file in folder.iterdir())
    assert resolved.model("org/m").path == folder
    assert prune.find_unused(everything=True) == []


def test_anyway_downloads_a_refused_model(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    _, hub.repos["org/m"], words = UNUSABLE["no tokenizer"]
    assert main(["pull", "--yes", "--anyway", "org/m"]) == 0
    assert words in capsys.readouterr().err, "why it cannot be used"


def test_cancelled_check_ends_at_once(hub: Hub) -> None:
    hub.repos["org/m"] = WHOLE
    download = Download("org/m", notify=lambda _: None)
    plan = download.plan()

    def cancel(request: Request) -> bool:
        if request.path.endswith(".safetensors?signature=1"):
            download.cancel()
        return False

    hub.fault = cancel
    with pytest.raises(Cancelled):
        download.run(plan)
    hub.fault = None
    assert not (plan.repository.folder / "snapshots").exists()
    [_, row] = listing.listed()
    assert (row.id, row.size > 0) == ("org/m", True), "the small files have arrived, no partial file tells of them"
    assert "continues it" in row.problem
    assert main(["pull", "--yes", "org/m"]) == 0


def stop_in_weights(hub: Hub, name: str) -> None:
    """Start a pull. The hub sends only the beginning of the weights."""
    download = Download(name)
    plan = download.plan()
    sizes = [leftover.received for leftover in partials(plan.repository.folder)]

    def watch(progress: object) -> None:
        if sum(leftover.received for leftover in partials(plan.repository.folder)) > sum(sizes):
            download.cancel()

    download.notify = watch
    hub.speed = 2 * 2**20
    with pytest.raises(Cancelled):
        download.run(plan)
    hub.speed = 0


def test_partial_of_a_changed_file_is_listed_then_deleted(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    size = 12 * 2**20
    hub.repos["org/m"] = model_files(size)
    hub.revisions["org/m"] = {"main": commit_of("1"), "v1": commit_of("v1")}
    stop_in_weights(hub, "org/m")
    hub.repos["org/m"] = model_files(size, seed=1)
    hub.revisions["org/m"] = {"main": commit_of("2"), "v1": commit_of("v1")}
    [_, row] = listing.listed()
    assert row.size >= 2**18
    plan = Download("org/m").plan()
    assert plan.received_bytes == 0, "of another file"
    assert plan.needed_bytes < plan.missing_bytes
    stop_in_weights(hub, "org/m@v1")
    folder = plan.repository.folder
    assert len({leftover.key for leftover in partials(folder)}) == 2, "each revision continues its own"
    assert main(["pull", "--yes", "org/m"]) == 0
    assert [leftover.revision for leftover in partials(folder)] in ([], ["v1"])
    assert main(["list", "--json"]) == 0
    capsys.readouterr()
    assert main(["pull", "--yes", "org/m@v1"]) == 0
    assert partials(folder) == []


def test_unfinished_files_without_a_journal_are_deleted_but_not_those_of_other_programs(hub: Hub) -> None:
    hub.repos["org/m"] = WHOLE
    blobs = paths.hub_cache_dir() / "models--org--m" / "blobs"
    blobs.mkdir(parents=True)
    own = [blobs / f"{'a' * 64}.localllm.incomplete", blobs / f"{'b' * 64}.localllm.journal"]
    foreign = blobs / f"{'c' * 64}.12345678.incomplete"
    for file in (*own, foreign):
        file.write_bytes(bytes(5000))
    assert main(["pull", "--yes", "org/m"]) == 0
    assert not any(file.exists() for file in own)
    assert foreign.exists()


def test_unfinished_bytes_beside_a_model_are_listed(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.repos["org/m"] = WHOLE
    assert main(["pull", "--yes", "org/m"]) == 0
    blobs = resolved.model("org/m").path.parent.parent / "blobs"
    (blobs / ("a" * 64)).write_bytes(bytes(100_000))
    capsys.readouterr()
    assert main(["list", "--json"]) == 0
    rows = {row["id"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["org/m"]["unfinished"] >= 100_000
    assert rows["guide"]["unfinished"] == 0
    assert main(["list"]) == 0
    assert "localllm prune --all deletes them" in capsys.readouterr().err


def test_chat_template_that_fails_is_a_warning_before_the_weights(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    template = json.dumps({"chat_template": "{{ raise_exception('never') }}"}).encode()
    hub.repos["org/m"] = {**WHOLE, "tokenizer_config.json": template}
    assert main(["pull", "--yes", "org/m"]) == 0
    assert "its chat template fails, so it cannot chat" in capsys.readouterr().err
    assert main(["rm", "--yes", "org/m"]) == 0
    capsys.readouterr()
    assert main(["pull", "--yes", "--json", "org/m"]) == 0
    events = [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()]
    assert events.count("warning") == 1
    assert events.index("warning") < events.index("complete")


def test_cut_file_of_a_snapshot_is_downloaded_again(hub: Hub) -> None:
    hub.repos["org/m"] = WHOLE
    assert main(["pull", "--yes", "org/m"]) == 0
    weights = resolved.model("org/m").path / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(100)
    assert main(["pull", "--yes", "org/m"]) == 0
    assert weights.read_bytes() == WHOLE["model.safetensors"]
