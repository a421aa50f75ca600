"""Takes the screenshot of README: the terminal UI with real answers of the daemon.

python scripts/tui_screenshot.py [--model guide] [--out assets/screenshot.svg] [QUESTION ...]
python scripts/tui_screenshot.py --out assets/adapters.svg "How do I list the models on this machine?" \\
    "/set adapter pirate" "How do I list the models on this machine?" \\
    "/set adapter steps" "How do I list the models on this machine?"
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from pathlib import Path

from textual.events import Paste

from localllm.app import paths
from localllm.app.client import Client
from localllm.app.config import load
from localllm.app.tui.app import ChatApp
from localllm.app.tui.conversation import Conversation
from localllm.app.tui.history.store import Store

QUESTIONS = ["How do I list the models on this machine?", "And how do I get a larger one?"]
SIZE = (100, 30)  # columns, rows


async def take_screenshot(model: str, questions: list[str], folder: Path) -> str:
    settings = load({"port": 0})
    conversation = Conversation(model, parameters={"temperature": 0.0, "max_tokens": 200})
    app = ChatApp(settings, conversation, connect=Client.connect, store=Store(folder / "history.sqlite3"))
    async with app.run_test(size=SIZE) as pilot:

        async def settle() -> None:
            while any(worker.is_running for worker in app.workers):
                await pilot.pause(0.1)
            await pilot.pause()

        await settle()
        for question in questions:
            app.screen.query_one("Prompt").post_message(Paste(question))
            await pilot.press("enter")
            await settle()
        app.clear_notifications()
        await pilot.pause()
        picture = app.export_screenshot(title="localllm chat")
        for message in conversation.path():
            print(f"{message.role}: {message.content} {message.error}")
    async with await Client.connect(settings, start=False) as client:
        await client.shutdown()
    return picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--model", default=paths.guide_dir().name)
    parser.add_argument("--out", type=Path, default=paths.assets_dir() / "screenshot.svg")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LOCALLLM_RUNTIME_DIR"] = str(Path(folder) / "run")
        arguments.out.write_text(
            asyncio.run(take_screenshot(arguments.model, arguments.questions, Path(folder))), "utf-8"
        )


if __name__ == "__main__":
    main()
