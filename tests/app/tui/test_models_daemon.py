"""The model screen with a real daemon and a hub on loopback."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from textual.widgets import Input

from localllm.app.client import Client
from localllm.app.tui.app import ChatApp

from ..daemon.conftest import Daemon
from ..hub import Hub, model_files, serving
from ..tiny_qwen import write_model
from .conftest import Chat, wait_until
from .fake_client import FakeClient

REFUSED = b'{"model_type": "mamba2"}'


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    write_model(tmp_path / "tiny")
    tiny = {file.name: file.read_bytes() for file in (tmp_path / "tiny").iterdir()}
    repos = {"org/tiny-model": tiny, "org/zz-model": {**model_files(), "config.json": REFUSED}}
    folder = Path(tempfile.mkdtemp(prefix="localllm-"))  # a short path for the socket
    with serving(Hub(repos)) as hub:
        running = Daemon(folder, env={"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"})
        assert running.url
        yield running
        assert running.stop() == 0, running.log
        assert "Traceback" not in running.log, running.log
    shutil.rmtree(folder)


async def shows(c: Chat, text: str) -> None:
    """Wait until the screen has a text. Fails with the screen."""
    await wait_until(c.pilot, lambda: text in c.shown(), says=lambda: f"the screen has no {text!r}:\n{c.shown()}")


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_newcomer_finds_inspects_downloads_verifies_and_deletes_a_model(
    daemon: Daemon, make_app: Callable[..., ChatApp], store: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALLLM_RUNTIME_DIR", daemon.env["LOCALLLM_RUNTIME_DIR"])
    app = make_app(FakeClient(), connect=Client.connect)
    async with app.run_test(size=(110, 40)) as pilot:
        c = Chat(pilot, app, FakeClient(), store)
        await pilot.press("f2")
        await shows(c, "Suggested for this machine")

        await pilot.press(*"-model", "enter")
        await shows(c, "1 k downloads · 7 likes")
        await shows(c, "· context 256")
        await pilot.press("down")
        await shows(c, "cannot run here")
        await pilot.press("up", "enter")
        await shows(c, "fit on ")
        await pilot.press("enter")
        await shows(c, "org/tiny-model: downloaded")

        await pilot.press("escape")
        assert app.screen.query_one(Input).value == ""
        await pilot.press("ctrl+k")
        await shows(c, "files are correct")
        await pilot.press("ctrl+a")
        await shows(c, "Alias of org/tiny-model")
        await pilot.press(*"tiny", "enter")
        await shows(c, "alias tiny")
        await pilot.press("ctrl+s")
        await shows(c, "Settings of org/tiny-model")
        await pilot.press(*"int8", "enter")
        await shows(c, "They apply when org/tiny-model is loaded next")
        await pilot.press("ctrl+o")
        await shows(c, "quant = int8")
        await pilot.press("escape")

        await pilot.press("ctrl+x")
        await shows(c, "Delete org/tiny-model and free")
        await pilot.press("y")
        await shows(c, "Deleted org/tiny-model")
        await pilot.press("ctrl+u", "a")
        await shows(c, "Every file is used.")
