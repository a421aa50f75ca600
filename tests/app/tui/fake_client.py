"""A client without a daemon: the methods of app.client.Client with scripted answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

from msgspec import structs

from localllm.app.api.admin import Installed
from localllm.app.client import (
    NO_FLAGS,
    AdapterEntry,
    AdapterFolder,
    BackendVerdict,
    Catalog,
    ChatEvent,
    Done,
    DtypeShare,
    FileProgress,
    FileVerdict,
    Fit,
    HubMatch,
    Imported,
    Inspection,
    InstallProgress,
    Job,
    LoadedModel,
    LoadFlags,
    Machine,
    ModelEntry,
    ModelFacts,
    Offer,
    Pruning,
    ReasoningPiece,
    SearchResult,
    StoredFile,
    TemplateVerdict,
    TextPiece,
    ToolCall,
    UnusedFiles,
    Usage,
    Verification,
)
from localllm.app.errors import AdapterNotFound, AppError, InvalidRequest, ModelNotFound

GUIDE = ModelEntry(id="guide", bundled=True, size=24_800_000, context=2048, description="tiny built-in model")
LARGE = ModelEntry(id="Qwen/Qwen3-4B", size=8_040_000_000, context=40_960)
SMALL = ModelEntry(id="HuggingFaceTB/SmolLM2-360M-Instruct", size=724_000_000, context=8192)
MACHINE = Machine(backend="cpu", device="Test CPU", memory=16 * 2**30, free=12 * 2**30, bandwidth=40e9)
QWEN = Offer(
    name="qwen3:1.7b",
    repository="Qwen/Qwen3-1.7B",
    licence="apache-2.0",
    size=4_100_000_000,
    memory=5_000_000_000,
    fit="fits",
    speed=9.8,
    suggested=True,
)
HUGE = Offer(
    name="qwen3:32b",
    repository="Qwen/Qwen3-32B",
    licence="apache-2.0",
    size=65_000_000_000,
    memory=70_000_000_000,
    fit="too large",
)

PIRATE = AdapterFolder(id="pirate", path="/assets/adapters/pirate", base="guide", rank=8, size=1_200_000, bundled=True)
PIRATE_ENTRY = AdapterEntry(id=0, name="pirate", model="guide", path=PIRATE.path, scale=0.0, pinned=False)
POET = AdapterFolder(id="org/poet", path="/hub/poet", base="someone/guide", rank=16, size=2_400_000)
OTHER = AdapterFolder(id="org/qwen-lora", path="/hub/qwen", base="Qwen/Qwen3-4B", rank=32, size=66_000_000)

MISTRAL = HubMatch(
    id="mistralai/Mistral-7B",
    downloads=1_234_567,
    licence="apache-2.0",
    likes=4_321,
    size=14_480_000_000,
    gated=True,
)
MAMBA = HubMatch(id="state-spaces/mamba2", downloads=900)
FITS = Fit(
    backend="cpu",
    device="Test CPU",
    fits=True,
    reason="",
    context=32_768,
    parallel=1,
    largest_context=32_768,
    free=12 * 2**30,
    weights=7 * 2**30,
    cache=4 * 2**30,
    tokens_per_second=5.4,
)
UNUSED = UnusedFiles(
    repo="org/half", folder="/hub/half", kind="partial", paths=["a"], disk_bytes=3 * 2**20, resumable=True
)


def inspection(name: str, **changed: Any) -> Inspection:
    """The inspection of a model on the hub."""
    fields: dict[str, Any] = {
        "name": name,
        "kind": "model",
        "source": f"{name}@0123abc",
        "local": False,
        "architecture": "mistral",
        "parameters": 7_240_000_000,
        "bytes": 14_480_000_000,
        "dtypes": (DtypeShare("BF16", 291, 14_480_000_000),),
        "quantization": "",
        "context": 32_768,
        "licence": "apache-2.0",
        "template": TemplateVerdict("works", system=True),
        "backends": (BackendVerdict("cpu", True, "Test CPU"),),
        "choice": "cpu",
    }
    return Inspection(**{**fields, **changed})


def refused(name: str) -> Inspection:
    """The inspection of a model that no backend runs."""
    return inspection(
        name,
        architecture="mamba2",
        problems=("architecture mamba2 is not supported",),
        pickles=("pytorch_model.bin",),
        backends=(),
        choice="",
    )


OnFile = Callable[[FileProgress], None]
Step = str | AppError | asyncio.Event | ReasoningPiece | ToolCall


class FakeClient:
    """Answers each question with the next list of `script`, then always with "Hello.".

    A step of an answer is text, reasoning, a tool call, an error to raise, or an event to wait for. `requests` has the
    bodies of all questions; `cancelled` counts the answers that were closed early.
    """

    def __init__(self, *script: list[Step], models: list[ModelEntry] | None = None) -> None:
        self.script = list(script)
        self.entries = [GUIDE, LARGE, SMALL] if models is None else models
        self.in_memory: list[LoadedModel] = []
        self.loaded_adapters: list[AdapterEntry] = []
        self.folders: list[AdapterFolder] = []
        self.machine = Machine()
        self.offers: list[Offer] = []
        self.jobs: dict[str, Job] = {}
        self.results = [MISTRAL, MAMBA]  # of every search of the hub
        self.search_error: str | None = None
        self.install_error: AppError | None = None
        self.inspections = {MISTRAL.id: inspection(MISTRAL.id), MAMBA.id: refused(MAMBA.id)}
        self.inspected: list[str] = []
        self.fits = [FITS]
        self.problems: list[str] = []  # of every verification
        self.unused = [UNUSED]
        self.kind: Literal["model", "adapter", "gguf"] = "model"  # of every model that is shown
        self.alias_names: dict[str, str] = {}
        self.model_settings: dict[str, dict[str, Any]] = {}
        self.gate: asyncio.Event | None = None  # long operations wait for it after their first progress
        self.stopped: list[str] = []  # long operations that were cancelled
        self.requests: list[dict[str, Any]] = []
        self.cancelled = 0
        self.connects = 0
        self.closed = False
        self.over = False
        self.connect_error: AppError | None = None

    async def connect(
        self, settings: object, *, start: bool = True, on_status: Callable[[str], None] | None = None
    ) -> FakeClient:
        self.connects += 1
        self.over = False
        if on_status is not None:
            on_status("starting the daemon")
        if self.connect_error is not None:
            raise self.connect_error
        return self

    async def __aenter__(self) -> FakeClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        self.closed = True

    async def models(self) -> list[ModelEntry]:
        return self.entries

    async def loaded(self) -> list[LoadedModel]:
        return self.in_memory

    async def load(
        self,
        model: str,
        *,
        flags: LoadFlags = NO_FLAGS,
        exact: bool = False,
        for_chat: bool = False,
        on_progress: Callable[[str, float], None] | None = None,
    ) -> LoadedModel:
        entry = next((entry for entry in self.entries if entry.id == model), None)
        if entry is None:
            raise ModelNotFound(f"There is no model {model!r} here.", hint="localllm list shows them.")
        if on_progress is not None:
            on_progress("reading weights", 0.5)
        loaded = LoadedModel(
            id=model,
            state="ready",
            pid=1,
            backend="cpu",
            device="test",
            dtype="bfloat16",
            context=entry.context,
            sampling={"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.0},
        )
        self.in_memory = [loaded]
        return loaded

    async def chat(self, model: str, messages: list[dict[str, Any]], **parameters: Any) -> AsyncIterator[ChatEvent]:
        self.requests.append({"model": model, "messages": messages, **parameters})
        pieces = 0
        try:
            for step in self.script.pop(0) if self.script else ["Hello."]:
                match step:
                    case AppError():
                        raise step
                    case asyncio.Event():
                        await step.wait()
                    case str():
                        pieces += 1
                        yield TextPiece(step)
                        await asyncio.sleep(0)
                    case _:
                        yield step
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled += 1
            raise
        usage = Usage(prompt_tokens=20 * len(messages), completion_tokens=max(1, pieces), cached_tokens=10)
        yield Done(finish="stop", usage=usage, ttft=0.12, seconds=0.12 + 0.02 * max(1, pieces))

    def complete(self, model: str, prompt: str, **parameters: Any) -> AsyncIterator[ChatEvent]:
        return self.chat(model, [{"role": "user", "content": prompt}], **parameters)

    async def adapters(self) -> list[AdapterEntry]:
        return self.loaded_adapters

    async def adapter_folders(self) -> list[AdapterFolder]:
        return self.folders

    async def load_adapter(self, name: str, path: str, **options: Any) -> None:
        folder = next((folder for folder in self.folders if folder.id == path), None)
        if folder is None:
            raise AdapterNotFound(f"adapter folder {path} does not exist", hint="an adapter is a folder")
        entry = AdapterEntry(
            id=len(self.loaded_adapters), name=name, model=options["model"], path=folder.path, scale=0.0, pinned=False
        )
        self.loaded_adapters = [*self.loaded_adapters, entry]

    async def unload_adapter(self, name: str, *, model: str | None = None) -> None:
        self.loaded_adapters = [entry for entry in self.loaded_adapters if (entry.name, entry.model) != (name, model)]

    async def catalog(self) -> Catalog:
        return Catalog(machine=self.machine, offers=self.offers)

    async def downloads(self) -> list[Job]:
        return list(self.jobs.values())

    async def download(self, name: str) -> Job:
        if name.endswith("missing"):
            raise ModelNotFound(f"{name} is not on the hub", hint="check the name")
        self.jobs[name] = Job(name=name, state="downloading", total=4_000_000_000, received=1_400_000_000)
        return self.jobs[name]

    async def change_download(self, name: str, action: str) -> Job:
        states: dict[str, Any] = {"pause": "paused", "resume": "downloading", "cancel": "cancelled"}
        self.jobs[name] = structs.replace(self.jobs[name], state=states[action])
        return self.jobs[name]

    async def delete(self, model: str) -> None:
        self.entries = [entry for entry in self.entries if entry.id != model]

    async def show(self, model: str) -> ModelFacts:
        return ModelFacts(
            id=model,
            kind=self.kind,
            path=f"/hub/{model}",
            repository=model,
            revision="0123abc",
            stored="2026-09-21T14:13:20+00:00",
            size=8_040_000_000,
            context=40_960,
            licence="apache-2.0",
            template=TemplateVerdict("works"),
            aliases=[alias for alias, name in self.alias_names.items() if name == model],
            problems=[],
            settings=self.model_settings.get(model, {}),
            description="qwen3, GGUF Q4_K_M",
            backend="llamacpp: GGUF files go to llama.cpp" if self.kind == "gguf" else "",
            files=[StoredFile("model.safetensors", 8_040_000_000, "sha256:" + "a" * 64)],
        )

    async def inspect(self, model: str) -> Inspection:
        self.inspected.append(model)
        await self._pass("inspect")
        if model not in self.inspections:
            raise ModelNotFound(f"{model} is not on the hub", hint="check the name")
        return self.inspections[model]

    async def fit(
        self, model: str, *, context: int = 0, parallel: int = 1, quant: str | None = None, backend: str | None = None
    ) -> list[Fit]:
        return self.fits

    async def search(self, query: str, *, limit: int = 20, offline: bool = False) -> SearchResult:
        await self._pass("search")
        return SearchResult(catalog=[], hub=self.results, error=self.search_error)

    async def verify(self, model: str, *, on_progress: OnFile | None = None) -> Verification:
        assert on_progress is not None
        on_progress(FileProgress("model.safetensors", 2 * 2**30, 8 * 2**30))
        await self._pass("verify")
        files = [FileVerdict("model.safetensors", "ok", 8 * 2**30), FileVerdict("notes", "unknown", 5)]
        return Verification(id=model, ok=not self.problems, problems=self.problems, files=files)

    async def prune(self, *, dry_run: bool = True, everything: bool = False) -> Pruning:
        found = [*self.unused, structs.replace(UNUSED, repo="org/fresh")] if everything else self.unused
        total = sum(files.disk_bytes for files in found)
        if not dry_run:
            self.unused = []
        return Pruning(unused=found, bytes=total, deleted=not dry_run, freed=0 if dry_run else total)

    async def import_model(
        self, path: str, name: str = "", *, copy: bool = False, on_progress: OnFile | None = None
    ) -> Imported:
        assert on_progress is not None
        on_progress(FileProgress("model.safetensors", 0, 10))
        await self._pass("import")
        if path.endswith("missing"):
            raise InvalidRequest(f"{path} is not a folder", hint="a model is a folder with config.json")
        self.entries = [*self.entries, ModelEntry(id=f"local/{name}", size=10)]
        return Imported(id=f"local/{name}", path=path, size=10)

    async def install_llamacpp(self, *, on_progress: Callable[[InstallProgress], None] | None = None) -> Installed:
        assert on_progress is not None
        on_progress(InstallProgress("Building wheel for llama-cpp-python"))
        on_progress(InstallProgress("[12/48] Building CXX object ggml.cpp.o", 12, 48))
        await self._pass("install")
        if self.install_error is not None:
            raise self.install_error
        self.entries = [structs.replace(entry, problem="", install="") for entry in self.entries]
        return Installed("llama.cpp")

    async def aliases(self) -> dict[str, str]:
        return self.alias_names

    async def set_alias(self, alias: str, name: str | None) -> dict[str, str]:
        if " " in alias:
            raise InvalidRequest(f"{alias!r} cannot be an alias", hint="an alias has no spaces")
        self.alias_names = {key: value for key, value in self.alias_names.items() if key != alias}
        if name is not None:
            self.alias_names[alias] = name
        return self.alias_names

    async def configure(self, model: str, changes: dict[str, str]) -> dict[str, Any]:
        values = {**self.model_settings.get(model, {}), **changes}
        self.model_settings[model] = {name: value for name, value in values.items() if value}
        return self.model_settings[model]

    async def _pass(self, operation: str) -> None:
        """Wait for the gate, if there is one."""
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.stopped.append(operation)
            raise

    async def unload(self, model: str) -> None:
        self.in_memory = [loaded for loaded in self.in_memory if loaded.id != model]

    async def shutdown(self) -> None:
        await self.close()
