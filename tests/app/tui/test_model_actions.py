"""The model screen: verification, unused files, folders, aliases, settings and adapters."""

from __future__ import annotations

import asyncio

from msgspec import structs

from localllm.app.client import ModelEntry
from localllm.app.errors import DaemonUnreachable, InstallFailed
from localllm.app.tui.models.model_settings import ModelSettingsScreen
from localllm.app.tui.models.pruning import PruneScreen
from localllm.app.tui.models.screen import ModelScreen
from localllm.app.tui.models.work import WorkScreen

from .conftest import Chat, OpenChat
from .fake_client import LARGE, OTHER, FakeClient
from .test_models import client, highlight, models


async def back(c: Chat) -> None:
    """Wait until the model screen is on top again."""
    await c.until(lambda: isinstance(c.app.screen, ModelScreen))
    await c.settle()


async def test_verification_shows_progress_and_its_result(chat: OpenChat) -> None:
    fake = client()
    async with models(chat, fake) as c:
        await highlight(c, LARGE.id)
        fake.gate = asyncio.Event()
        await c.pilot.press("ctrl+k")
        await c.until(lambda: "2.0 GiB of 8.0 GiB" in c.shown())
        assert "model.safetensors" in c.shown()
        fake.gate.set()
        await back(c)
        assert "1 files are correct; 1 files have no hash of a hub, so nothing vouches for their bytes." in c.text_of(
            "#notice"
        )
        fake.problems = [f"file-{index} is damaged" for index in range(5)]
        await c.pilot.press("ctrl+k")
        await back(c)
        notice = c.text_of("#notice")
        assert "file-2 is damaged and 2 more. Delete it (Ctrl+X) and download it again." in notice


async def test_escape_cancels_a_verification(chat: OpenChat) -> None:
    fake = client()
    async with models(chat, fake) as c:
        await highlight(c, LARGE.id)
        fake.gate = asyncio.Event()
        await c.pilot.press("ctrl+k")
        await c.until(lambda: isinstance(c.app.screen, WorkScreen))
        await c.pilot.press("escape")
        await back(c)
        assert fake.stopped == ["verify"]
        assert c.text_of("#notice") == "Cancelled."


async def test_unused_files_are_listed_before_they_are_deleted(chat: OpenChat) -> None:
    fake = client()
    async with models(chat, fake) as c:
        await c.pilot.press("ctrl+u")
        await c.until(lambda: "Delete 1 unused files and free 3.0 MiB?" in c.shown())
        assert "org/half  unfinished download, can be continued" in c.shown()
        await c.pilot.press("a")
        await c.until(lambda: "Delete 2 unused files and free 6.0 MiB?" in c.shown())
        await c.pilot.press("escape")
        await back(c)
        assert fake.unused
        await c.pilot.press("ctrl+u")
        await c.until(lambda: "Delete 1 unused files" in c.shown())
        await c.pilot.press("y")
        await back(c)
        assert "Freed 3.0 MiB." in c.text_of("#notice")
        await c.pilot.press("ctrl+u")
        await c.until(lambda: isinstance(c.app.screen, PruneScreen) and "is used" in c.shown())
        await c.pilot.press("y")
        assert isinstance(c.app.screen, PruneScreen)


async def test_folder_is_added_by_key_and_by_a_typed_path(chat: OpenChat) -> None:
    fake = client()
    async with models(chat, fake) as c:
        await c.pilot.press("ctrl+f")
        await c.until(lambda: "Folder of the model" in c.shown())
        await c.pilot.press("end", *"tiny", "enter")
        await c.until(lambda: "Name in localllm" in c.shown())
        await c.pilot.press("enter")
        await back(c)
        assert "Added local/tiny. Its files stay in" in c.text_of("#notice")
        assert "local/tiny" in c.shown()
        await c.pilot.press(*"/srv/missing", "enter")
        await c.until(lambda: "Name in localllm" in c.shown())
        await c.pilot.press("enter")
        await back(c)
        assert "/srv/missing is not a folder. A model is a folder with config.json." in c.text_of("#notice")
        await c.pilot.press("enter")
        await c.until(lambda: "Name in localllm" in c.shown())
        await c.pilot.press("escape")
        await back(c)


async def test_alias_is_set_renamed_and_removed(chat: OpenChat) -> None:
    fake = client()
    async with models(chat, fake) as c:
        await highlight(c, LARGE.id)
        steps = [
            (["b", "i", "g"], {"big": LARGE.id}),
            (["end", "2"], {"big2": LARGE.id}),
            (["end", "space", "x"], {"big2": LARGE.id}),
            (["escape"], {"big2": LARGE.id}),
            (["end", "ctrl+u"], {}),
        ]
        for keys, aliases in steps:
            await c.pilot.press("ctrl+a")
            await c.until(lambda: "Alias of Qwen/Qwen3-4B" in c.shown())
            await c.pilot.press(*keys)
            if keys != ["escape"]:
                await c.pilot.press("enter")
            await back(c)
            assert fake.alias_names == aliases
            if "space" in keys:
                assert "An alias has no spaces." in c.text_of("#notice")


async def test_settings_of_a_model_are_checked_and_saved(chat: OpenChat) -> None:
    fake = client()
    fake.model_settings[LARGE.id] = {"context": 8192}
    async with models(chat, fake) as c:
        await highlight(c, LARGE.id)
        await c.pilot.press("ctrl+s")
        await c.until(lambda: isinstance(c.app.screen, ModelSettingsScreen))
        await c.pilot.pause()
        assert "8192" in c.shown()
        assert "quant: " in c.text_of("#notice")
        await c.pilot.press(*"int5", "enter")
        assert isinstance(c.app.screen, ModelSettingsScreen)
        assert "int5" in c.text_of("#notice")
        await c.pilot.press("backspace", "4", "tab", "backspace", "ctrl+s")
        await back(c)
        assert fake.model_settings[LARGE.id] == {"quant": "int4"}
        assert "They apply when Qwen/Qwen3-4B is loaded next." in c.text_of("#notice")
        await c.pilot.press("ctrl+s", "escape")
        await back(c)
        assert fake.model_settings[LARGE.id] == {"quant": "int4"}


async def test_adapter_beside_its_base_is_used_with_it(chat: OpenChat) -> None:
    fake = client()
    async with models(chat, fake) as c:
        await highlight(c, OTHER.id)
        assert "Enter uses it · Ctrl+O details · Ctrl+K check files · Ctrl+X delete" in c.text_of(".keys")
        await c.press("enter")
        assert (c.screen.conversation.model, c.screen.conversation.adapter) == (LARGE.id, "qwen-lora")


async def test_adapter_without_its_base_names_the_base(chat: OpenChat) -> None:
    fake = client()
    fake.folders = [structs.replace(OTHER, base="org/absent")]
    async with models(chat, fake) as c:
        assert "its base model org/absent is not on this machine" in c.shown()
        await highlight(c, OTHER.id)
        await c.press("enter")
        assert "Download the base model first" in c.text_of("#notice")


async def test_the_question_of_a_deletion_names_the_aliases(chat: OpenChat) -> None:
    fake = client()
    fake.alias_names = {"big": LARGE.id, "huge": LARGE.id, "other": OTHER.id}
    async with models(chat, fake) as c:
        await highlight(c, LARGE.id)
        await c.pilot.press("ctrl+x")
        await c.until(lambda: f"Delete {LARGE.id}" in c.shown())
        assert "This also removes: alias big, huge." in c.text_of("Static")


async def test_long_and_hostile_texts_leave_room_for_the_list(chat: OpenChat) -> None:
    fake = client()
    hostile = "org/[b]x[/b]\n\x1b[2J" + "y" * 3000
    fake.entries = [*fake.entries, ModelEntry(id=hostile, size=10)]

    async def fail(*_: object, **__: object) -> None:
        raise DaemonUnreachable("broken\n" * 500, hint="h" * 5000)

    async with models(chat, fake) as c:
        await highlight(c, "[b]")
        await c.pilot.press("ctrl+x")
        await c.until(lambda: "Delete org/[b]x[/b]" in c.shown())
        assert "and free 10 B?" in " ".join(c.shown().replace("│", "").split())
        assert "y yes · n no" in c.shown()
        await c.pilot.press("n")
        await back(c)
        fake.configure = fail
        await c.pilot.press("ctrl+s")
        await back(c)
        assert "Broken broken broken" in c.shown()
        assert "org/[b]x[/b] [2Jyyy" in c.shown()
        assert "Ctrl+O details" in c.shown()


async def test_keys_that_do_not_fit_the_row_say_why(chat: OpenChat) -> None:
    async with models(chat) as c:
        await highlight(c, "qwen3:1.7b")
        for key, reason in (("ctrl+k", "can be verified"), ("ctrl+s", "has settings"), ("ctrl+a", "can have an alias")):
            await c.press(key)
            assert reason in c.text_of("#notice")


async def test_daemon_that_stops_is_named_and_the_screen_stays(chat: OpenChat) -> None:
    fake = client()

    async def fail(*_: object, **__: object) -> None:
        raise DaemonUnreachable("the daemon stopped", hint="try again")

    async with models(chat, fake) as c:
        await highlight(c, LARGE.id)
        for method in ("verify", "configure", "fit", "show", "prune"):
            setattr(fake, method, fail)
        for key in ("ctrl+k", "ctrl+s"):
            await c.pilot.press(key)
            await back(c)
            assert "The daemon stopped. Try again." in c.text_of("#notice")
        for key in ("ctrl+o", "ctrl+u"):
            await c.pilot.press(key)
            await c.until(lambda: "The daemon stopped. Try again." in c.text_of("#notice"))
            await c.pilot.press("escape")
            await back(c)


def without_llamacpp() -> FakeClient:
    fake = client()
    for quant in ("Q4_K_M", "Q8_0"):
        problem = "llama-cpp-python is not installed: make build GGUF=1"
        entry = ModelEntry(id=f"org/gguf:{quant}", gguf=True, size=10, problem=problem, install="make build GGUF=1")
        fake.entries = [*fake.entries, entry]
    return fake


async def test_models_without_llama_cpp_have_one_line(chat: OpenChat) -> None:
    async with models(chat, without_llamacpp(), size=(100, 40)) as c:
        assert c.shown().count("make build GGUF=1") == 1
        assert "2 GGUF models need llama.cpp: make build GGUF=1 · Ctrl+L installs it" in c.shown()
        await highlight(c, "org/gguf:Q8_0")
        assert "Ctrl+L install llama.cpp" in c.text_of(".keys")
        assert "Ctrl+D" not in c.text_of(".keys")
        for key in ("enter", "ctrl+d"):
            await c.press(key)
            assert "Ctrl+L installs" in c.text_of("#notice")
        assert not c.client.jobs


async def test_llama_cpp_is_installed_with_progress(chat: OpenChat) -> None:
    fake = without_llamacpp()
    fake.gate = asyncio.Event()
    async with models(chat, fake) as c:
        await c.pilot.press("ctrl+l", "y")
        await c.until(lambda: "step 12 of 48" in c.shown())
        assert "[12/48] Building CXX object ggml.cpp.o" in c.shown()
        fake.gate.set()
        await back(c)
        assert c.text_of("#notice") == "llama.cpp is installed."
        assert "need llama.cpp" not in c.shown()
        await highlight(c, "org/gguf:Q8_0")
        assert "Enter uses it" in c.text_of(".keys")
        await c.press("ctrl+l")
        assert "No model here needs llama.cpp" in c.text_of("#notice")


async def test_installation_can_be_cancelled(chat: OpenChat) -> None:
    fake = without_llamacpp()
    fake.gate = asyncio.Event()
    async with models(chat, fake) as c:
        await c.pilot.press("ctrl+l", "y")
        await c.until(lambda: "step 12 of 48" in c.shown())
        await c.pilot.press("escape")
        await back(c)
        assert fake.stopped == ["install"]
        assert c.text_of("#notice") == "llama.cpp is not installed."


async def test_failed_installation_shows_its_last_lines(chat: OpenChat) -> None:
    fake = without_llamacpp()
    fake.install_error = InstallFailed("the installation failed", hint="error: no \x1b[31mcompiler\nmake: failed")
    async with models(chat, fake) as c:
        await c.pilot.press("ctrl+l", "y")
        await c.until(lambda: "error: no [31mcompiler" in c.shown())
        assert "make: failed" in c.shown()
        assert c.text_of("#notice") == "The installation failed."
        await c.pilot.press("escape")
        await back(c)
        assert c.text_of("#notice") == "llama.cpp is not installed."
