"""Takes the pictures of README: the terminal UI with real answers of the daemon. They need no network.

python scripts/tui_screenshot.py [SCENE ...]        writes docs/pictures/SCENE.svg
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import struct
import sys
import tempfile
from pathlib import Path

from textual.events import Paste

from localllm.app import paths
from localllm.app.client import Client
from localllm.app.config import load
from localllm.app.tui.app import ChatApp
from localllm.app.tui.conversation import Conversation
from localllm.app.tui.history.store import Store

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.bench.shapes import QWEN3_06B, QWEN3_8B, Shape  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
QUESTION = "How do I list the models on this machine?"
MODELS = {"Qwen/Qwen3-0.6B": QWEN3_06B, "Qwen/Qwen3-8B": QWEN3_8B}

# Scene -> rows of the terminal, seconds of the last step, and the steps: a key, or a text to send, which has a space.
SCENES: dict[str, tuple[int, float, list[str]]] = {
    "chat": (21, 0.5, [QUESTION, "And how do I get a larger one?"]),
    "models": (32, 5.0, ["f2"]),
    "compare": (14, 0.5, ["/compare pirate steps", QUESTION]),
    "fit": (30, 20.0, ["f2", *"qwen3-0.6b", "ctrl+o"]),
}
COLUMNS = 100
REVISION = hashlib.sha1(b"localllm").hexdigest()


def store_model(repository: str, shape: Shape, cache: Path) -> None:
    """A downloaded model of this shape in the cache. Its weights are a hole of the file: only headers are read."""
    snapshot = cache / f"models--{repository.replace('/', '--')}" / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(REVISION)
    (snapshot / "config.json").write_text(json.dumps(shape.config()))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (snapshot / name).write_bytes((paths.guide_dir() / name).read_bytes())
    header: dict[str, object] = {}
    end = 0
    for tensor in shape.tensors():
        for name, sizes in tensor.stored():
            start, end = end, end + 2 * tensor.size
            header[name] = {"dtype": "BF16", "shape": sizes, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (snapshot / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(file.tell() + end)


async def take_picture(rows: int, seconds: float, steps: list[str], history: Path) -> str:
    settings = load({"port": 0})
    conversation = Conversation("guide", parameters={"temperature": 0.0, "max_tokens": 200})
    app = ChatApp(settings, conversation, connect=Client.connect, store=Store(history))
    async with app.run_test(size=(COLUMNS, rows)) as pilot:

        async def settle() -> None:
            for _ in range(100):  # a dialog is a worker that runs until it closes
                await pilot.pause(0.1)
                if all(worker.is_finished or worker.group == "action" for worker in app.workers):
                    return

        await settle()
        for step in steps:
            if " " in step:
                app.screen.query_one("Prompt").post_message(Paste(step))
                await pilot.press("enter")
            else:
                await pilot.press(step)
            await settle()
        await pilot.pause(seconds)
        app.clear_notifications()
        await pilot.pause()
        picture = app.export_screenshot(title="localllm chat")
    async with await Client.connect(settings, start=False) as client:
        await client.shutdown()
    return picture


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ |= {"LOCALLLM_RUNTIME_DIR": str(folder / "run"), "HF_HUB_CACHE": str(folder / "hub")}
        for repository, shape in MODELS.items():
            store_model(repository, shape, folder / "hub")
        for scene in sys.argv[1:] or SCENES:
            picture = asyncio.run(take_picture(*SCENES[scene], folder / "history.sqlite3"))
            (PICTURES / f"{scene}.svg").write_text(picture, "utf-8")


if __name__ == "__main__":
    main()
