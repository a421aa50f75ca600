"""The model screen: the search of the hub, the inspection of its results, and the detail screen."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace
from textual.widgets import Input

from localllm.app.client import BackendVerdict, Fit, HubMatch, Job
from localllm.app.errors import DownloadFailed
from localllm.app.tui.models.assessment import Assessment, verdict
from localllm.app.tui.models.details import DetailScreen
from localllm.app.tui.models.rows import HubResults, Lists, Row, matching, rows
from localllm.app.tui.models.screen import ModelScreen

from .conftest import Chat, OpenChat
from .fake_client import FITS, GUIDE, HUGE, LARGE, MAMBA, MISTRAL, OTHER, PIRATE, inspection, refused
from .test_models import client, highlight, models


async def search(c: Chat, word: str) -> None:
    """Type a word that matches no model here, and search the hub."""
    await c.press(*word, "enter")


async def test_words_without_a_match_search_the_hub(chat: OpenChat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.app.tui.models.browser.INSPECT_SECONDS", 1000.0)
    async with models(chat, size=(100, 30)) as c:
        await c.pilot.press(*"mistral")
        assert "search the hub for “mistral”" in c.shown()
        assert "Enter searches" in c.text_of(".keys")
        await c.press("enter")
        shown = c.shown()
        assert "mistralai/Mistral-7B" in shown
        assert "13.5 GiB · apache-2.0 · needs an account · 1.2 M downloads · 4 k likes" in shown
        assert "search the hub" not in shown
        await c.pilot.press("x")
        assert "search the hub for “mistralx”" in c.shown()


async def test_gguf_result_shows_its_quantisations(chat: OpenChat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.app.tui.models.browser.INSPECT_SECONDS", 1000.0)
    fake = client()
    quants = ("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "BF16")
    fake.results = [HubMatch(id="org/mistral-GGUF", formats=("gguf",), quants=quants)]
    async with models(chat, fake, size=(100, 30)) as c:
        await search(c, "mistral")
        assert "GGUF Q2_K, Q3_K_M, Q4_K_M, Q5_K_M, Q6_K, Q8_0 and 1 more" in c.shown()


async def test_highlighted_result_is_inspected_and_says_why_it_cannot_run(chat: OpenChat) -> None:
    async with models(chat) as c:
        await search(c, "mistral")
        await c.until(lambda: "fits on cpu · context 32,768 · estimated 5 tok/s · mistral" in c.shown())
        await c.pilot.press("down")
        await c.until(lambda: "cannot run here: architecture mamba2 is not supported" in c.shown())
        await c.pilot.press("up", "down")
        await c.pilot.pause(1)
        assert c.client.inspected == [MISTRAL.id, MAMBA.id]


async def test_inspection_continues_when_the_highlight_moves(chat: OpenChat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.app.tui.models.browser.INSPECT_SECONDS", 0.01)
    fake = client()
    third = HubMatch(id="org/mistral-three")
    fake.results = [MISTRAL, MAMBA, third]
    fake.inspections[third.id] = inspection(third.id)
    async with models(chat, fake) as c:
        await search(c, "mistral")
        await c.until(lambda: fake.inspected == [MISTRAL.id])
        await c.settle()
        fake.gate = asyncio.Event()
        await c.pilot.press("down")
        await c.until(lambda: "inspecting…" in c.shown())
        await c.pilot.press("down")
        await c.pilot.pause(0.1)
        fake.gate.set()
        await c.settle()
        assert fake.inspected == [MISTRAL.id, MAMBA.id, third.id]
        assert fake.stopped == []


async def test_inspection_is_shown_before_the_fit(chat: OpenChat) -> None:
    fake = client()
    gate = asyncio.Event()

    async def fit(model: str) -> list[Fit]:
        await gate.wait()
        return [FITS]

    fake.fit = fit
    async with models(chat, fake, size=(100, 40)) as c:
        await c.pilot.press(*"mistral", "enter")
        await c.until(lambda: "runs on cpu · mistral" in c.shown())
        await c.pilot.press("ctrl+o")
        await c.until(lambda: "7.24 B" in c.shown() and "Computing the memory" in c.shown())
        gate.set()
        await c.until(lambda: "fit on cpu" in c.shown())
        assert c.shown().count("7.24 B") == 1


async def test_result_is_inspected_in_detail_then_downloaded(chat: OpenChat) -> None:
    async with models(chat, size=(100, 40)) as c:
        await search(c, "mistral")
        await c.pilot.press("enter")
        await c.until(lambda: "estimated 5 tok/s" in c.shown())
        shown = c.shown()
        for text in (
            "mistralai/Mistral-7B@0123abc",
            "7.24 B",
            "BF16 13.5 GiB",
            "works, renders system messages",
            "cpu: yes, selected, Test CPU",
            "fits, context up to 32,768 tokens",
            "12.0 GiB free · weights 7.0 GiB · KV cache 4.0 GiB for 32,768 tokens",
        ):
            assert text in shown
        await c.press("enter")
        assert list(c.client.jobs) == [MISTRAL.id]
        assert "downloading · 35%" in c.shown()


async def test_details_of_a_refused_model_name_the_reason(chat: OpenChat) -> None:
    async with models(chat, size=(100, 40)) as c:
        await search(c, "mamba")
        await c.pilot.press("down", "ctrl+o")
        await c.until(lambda: "cannot run" in c.shown())
        assert "architecture mamba2 is not supported" in c.shown()
        assert "pytorch_model.bin: pickle weights could run code; never downloaded" in c.shown()
        assert "downloads" not in c.text_of(".keys")
        await c.pilot.press("enter")
        await c.pilot.pause()
        assert isinstance(c.app.screen, DetailScreen)
        assert not c.client.jobs


async def test_hub_that_is_offline_or_has_no_result_is_named(chat: OpenChat) -> None:
    fake = client()
    fake.results = []
    fake.search_error = "cannot search https://hub: offline mode is on"
    async with models(chat, fake) as c:
        await search(c, "zzz")
        assert "offline mode is on" in c.text_of("#notice")
        fake.search_error = None
        assert "search the hub for “zzz”" in c.shown()
        await c.press("y", "enter")
        assert "no text model with the words “zzzy”" in c.text_of("#notice")


async def test_escape_cancels_a_search_then_clears_the_filter_then_closes(chat: OpenChat) -> None:
    fake = client()
    async with models(chat, fake) as c:
        fake.gate = asyncio.Event()
        await c.pilot.press(*"mistral", "enter")
        await c.until(lambda: "Searching the hub" in c.text_of("#notice"))
        await c.press("escape")
        assert fake.stopped == ["search"]
        assert "Cancelled" in c.text_of("#notice")
        await c.pilot.press("escape")
        await c.pilot.pause()
        assert isinstance(c.app.screen, ModelScreen)
        assert "Qwen/Qwen3-4B" in c.shown()
        await c.pilot.press("x")
        assert c.app.screen.query_one(Input).value == "x"
        await c.pilot.press("escape", "escape")
        await c.pilot.pause()
        assert c.app.screen is c.screen


async def test_search_that_ends_late_leaves_the_cursor_in_the_filter(chat: OpenChat) -> None:
    fake = client()
    async with models(chat, fake) as c:
        fake.gate = asyncio.Event()
        await c.pilot.press(*"mistral", "enter")
        await c.until(lambda: "Searching the hub" in c.text_of("#notice"))
        await c.pilot.press("x")
        fake.gate.set()
        await c.settle()
        assert isinstance(c.app.focused, Input)
        assert "search the hub for “mistralx”" in c.shown()


async def test_escape_closes_the_details_and_ends_the_inspection(chat: OpenChat) -> None:
    fake = client()
    async with models(chat, fake) as c:
        await highlight(c, "qwen3:1.7b")
        fake.gate = asyncio.Event()
        await c.pilot.press("ctrl+o")
        await c.until(lambda: isinstance(c.app.screen, DetailScreen) and bool(fake.inspected))
        await c.press("escape")
        assert isinstance(c.app.screen, ModelScreen)
        assert fake.stopped == ["inspect"]


async def test_details_of_a_local_model_show_provenance_and_use(chat: OpenChat) -> None:
    fake = client()
    fake.alias_names = {"big": LARGE.id}
    fake.model_settings[LARGE.id] = {"quant": "int4"}
    async with models(chat, fake, size=(100, 40)) as c:
        assert "alias big" in c.shown()
        await highlight(c, LARGE.id)
        await c.pilot.press("ctrl+o")
        await c.until(lambda: "fit on cpu" in c.shown())
        shown = c.shown()
        for text in ("0123abc", "2026-09-21", "sha256:aaaa", "big", "quant = int4", OTHER.id, "loaded"):
            assert text in shown
        await c.press("enter")
        assert c.screen.conversation.model == LARGE.id


@pytest.mark.parametrize(
    ("kind", "name", "last", "texts"),
    [
        ("adapter", OTHER.id, "sha256", ["rank", "base model", OTHER.base]),
        ("gguf", LARGE.id, "fit on cpu", ["qwen3, GGUF Q4_K_M", "llamacpp: GGUF files go to llama.cpp"]),
    ],
)
async def test_details_of_a_kind(chat: OpenChat, kind: str, name: str, last: str, texts: list[str]) -> None:
    fake = client()
    fake.kind = kind
    async with models(chat, fake, size=(100, 40)) as c:
        await highlight(c, name)
        await c.pilot.press("ctrl+o")
        await c.until(lambda: last in c.shown())
        for text in texts:
            assert text in c.shown()


async def test_text_of_the_hub_is_shown_as_plain_text(chat: OpenChat) -> None:
    fake = client()
    hostile = "[red]x[/red]\n\x1b[2J\u202e"
    fake.results = [HubMatch(id=f"evil/{hostile}", downloads=5, licence=hostile)]
    fake.inspections[fake.results[0].id] = inspection(hostile, architecture=hostile, licence=hostile, source=hostile)
    async with models(chat, fake, size=(100, 40)) as c:
        await search(c, "evil")
        assert "evil/[red]x[/red] [2J⟨U+202E⟩" in c.shown()
        await c.pilot.press("enter")
        await c.until(lambda: "fit on cpu" in c.shown())
        assert c.shown().count("[red]x[/red] [2J⟨U+202E⟩") >= 4


def test_search_results_leave_out_models_that_are_listed() -> None:
    listed = [Row("Qwen/Qwen3-4B", "model", entry=LARGE), Row("qwen3:32b", "offer", offer=HUGE)]
    hub = HubResults("qwen3", [HubMatch(id=id) for id in ("Qwen/Qwen3-4B", "Qwen/Qwen3-32B", "org/qwen3-new")])
    keys = [row.key for row in matching(listed, "qwen3", hub, {"org/qwen3-new": "runs"})]
    assert sorted(keys) == ["Qwen/Qwen3-4B", "org/qwen3-new", "qwen3:32b"]
    assert [row.key for row in matching(listed, "Qwen/Qwen3-32B", hub, {})] == [
        "qwen3:32b",
        "search Qwen/Qwen3-32B",
    ]
    assert [row.kind for row in matching([], "~/model", hub, {})] == ["folder"]


def test_downloaded_result_stays_in_the_list_of_results() -> None:
    listed = [Row("org/chat", "model", entry=LARGE), Row("org/talk", "download", job=Job(name="org/talk"))]
    hub = HubResults("pirate words", [HubMatch(id=id) for id in ("org/Chat", "org/talk", "org/new")])
    kinds = [row.kind for row in matching(listed, "pirate words", hub, {})]
    assert kinds == ["model", "download", "result"]


def test_filter_ignores_spaces_between_words() -> None:
    listed = [Row("qwen3:0.6b", "offer", offer=HUGE)]
    assert [row.key for row in matching(listed, "qwen 0.6", HubResults(), {})] == ["qwen3:0.6b", "search qwen 0.6"]


def test_adapters_stand_beside_their_base_models() -> None:
    lists = Lists(entries=[GUIDE], folders=[PIRATE, OTHER])
    assert [(row.key, row.base) for row in rows(lists)] == [
        ("guide", ""),
        ("guide + pirate", "guide"),
        ("org/qwen-lora", ""),
    ]


def test_verdict_on_one_line() -> None:
    no_backend = inspection("m", backends=(BackendVerdict("cuda", False, "int3 is not supported"),), choice="")
    small = Fit(
        backend="cpu",
        device="",
        fits=False,
        reason="its weights do not fit",
        context=0,
        parallel=1,
        largest_context=0,
        free=1,
    )
    other_format = replace(small, backend="cuda", reason="it reads no GGUF files", runs=False)
    cases = [
        (Assessment(inspection("m"), (other_format, small)), "does not fit on cpu: its weights do not fit"),
        (Assessment(inspection("m"), (other_format,)), "cannot run on cuda: it reads no GGUF files"),
        (Assessment(error=DownloadFailed("the hub is offline")), "the hub is offline"),
        (Assessment(refused("m")), "cannot run here: architecture mamba2 is not supported"),
        (Assessment(no_backend), "cannot run here: cuda: int3 is not supported"),
        (Assessment(inspection("m"), (small,)), "does not fit on cpu: its weights do not fit"),
        (Assessment(inspection("m"), (FITS,)), "fits on cpu · context 32,768 · estimated 5 tok/s · mistral · 13.5 GiB"),
        (Assessment(inspection("m"), (replace(FITS, backend="mlx"), FITS)), "fits on cpu"),
        (Assessment(inspection("m", kind="adapter", base="org/base")), "adapter of org/base"),
        (Assessment(inspection("m"), error=DownloadFailed("late")), "runs on cpu"),
    ]
    for assessment, text in cases:
        assert verdict(assessment).startswith(text)
