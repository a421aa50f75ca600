"""The options of a load: the settings of the daemon, then those of the model, then the flags of one call."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ...engine.files.model_files import MODULES
from ...engine.options import LoadOptions
from .. import children, config, paths
from ..api.admin import LoadFlags
from ..api.models import Request
from ..config import Settings
from ..errors import EmbeddingsUnsupported, InvalidRequest, NoBackend, OtherOptions
from ..frames import Embed, Fault, Load
from ..store import preferences
from ..store.local.refs import ModelRef
from .process import WorkerProcess

CHECK = (sys.executable, "-P", "-m", "localllm.app.worker.backend_child")
BUSY_HINT = "try again when its answers have ended, or unload it first (localllm stop)"
CHECK_SECONDS = 60.0  # maximum duration of a backend probe: a call into a broken driver may never return


def load_settings(settings: Settings, model: str, flags: LoadFlags) -> Settings:
    """The settings that load a model. A flag of the call precedes the model's settings, which precede `settings`.

    Flags of `localllm serve` precede the model's settings. Raises ConfigError for a malformed setting of the model.
    """
    values = config.model_settings(preferences.read().settings, model)
    chosen = {name: value for name, value in values.items() if name not in settings.flags}
    chosen |= {name: value for name, value in msgspec.structs.asdict(flags).items() if value is not None}
    return msgspec.structs.replace(settings, **chosen, own=tuple(chosen))


def load_frame(ref: ModelRef, settings: Settings) -> Load:
    """The frame that loads a model with these settings."""
    options = load_options(settings, ref)
    return Load(
        model=ref.id, path=str(ref.path), backend=settings.backend, options=options, shared=shared_settings(settings)
    )


def shared_settings(settings: Settings) -> tuple[str, ...]:
    """The names of the settings that hold for all models. A model that does not support one is loaded without it."""
    return tuple(name for name in config.LOADING if name not in settings.own)


def load_options(settings: Settings, ref: ModelRef) -> LoadOptions:
    """The load options for a runner. The value 0 of a setting means automatic; the options have None instead."""
    return LoadOptions(
        context=settings.context or None,
        cache_bytes=settings.cache_mib * 2**20 or None,
        max_rows=settings.max_rows,
        dtype=settings.dtype,
        cache_dtype=settings.cache_dtype,
        cache_layout=settings.cache_layout,
        quant=settings.quant,
        packed_dir=paths.packed_dir(ref.path),
        graphs=settings.graphs,
        compiler=settings.developer.compiler,
        compiled_dir=paths.compiled_dir(),
        threads=settings.threads or None,
        rope_scaling=settings.rope_scaling,
        rope_scale=settings.rope_scale or None,
        rope_base=settings.rope_base or None,
        gpu_layers=None if settings.gpu_layers < 0 else settings.gpu_layers,
        streams=settings.developer.streams,
        ops=settings.developer.ops,
        attention=settings.developer.attention,
        lora_backend=settings.developer.lora_backend,
        weight_layout=settings.developer.weight_layout,
        prefetch=settings.developer.prefetch,
        adapter_slots=settings.adapter_slots,
        adapter_rank=settings.adapter_rank,
        self_test_dir=paths.self_test_dir() if settings.developer.self_test == "on" else None,
    )


def as_flags(loaded: Settings, settings: Settings) -> tuple[str, ...]:
    """The settings that loaded a model and differ from the daemon's, as flags of the command line."""
    values = config.loading(loaded)
    defaults = config.loading(settings)
    names = [name for name in config.LOADING if values[name] != defaults[name]]
    return tuple(f"--{name.replace('_', '-')} {values[name]}" for name in names)


def fits(worker: WorkerProcess, loaded: Settings, requested: Settings) -> bool:
    """True if a model that was loaded with the settings `loaded` is as one that `requested` would load.

    A named backend fits a model that the choice `auto` loaded on that backend.
    """
    if worker.info is not None and requested.backend == worker.info.backend:
        loaded = msgspec.structs.replace(loaded, backend=requested.backend)
    return config.loading(loaded) == config.loading(requested)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """The options that a call needs. `settings` are those that its flags and the settings of the model result in."""

    flags: LoadFlags
    settings: Settings
    exact: bool = False  # all settings must be those of the call, not only its flags

    def mismatch(self, worker: WorkerProcess, loaded: Settings) -> InvalidRequest | None:
        """The error of this call if the worker, which was loaded with `loaded`, is busy; None if it fits the call."""
        flag = _differing_flag(worker, self.flags)
        if flag is not None:
            return flag
        if worker.info is not None and set(worker.info.unapplied) & set(self.settings.own):
            return _other_options(worker)  # the load left out a setting of all models that is now one of this model
        if self.exact and not fits(worker, loaded, self.settings):
            return _other_options(worker)
        return None


def _other_options(worker: WorkerProcess) -> OtherOptions:
    message = f"{worker.model} is busy with other options than this request needs"
    return OtherOptions(message, hint=BUSY_HINT, param="load")


def _differing_flag(worker: WorkerProcess, flags: LoadFlags) -> InvalidRequest | None:
    info = worker.info
    if info is None:
        return None
    options = worker.load_frame.options
    if flags.backend not in (None, "auto", info.backend):
        return InvalidRequest(f"{worker.model} is busy on {info.backend}", hint=BUSY_HINT, param="backend")
    if flags.context is not None and flags.context != (options.context or 0):
        return InvalidRequest(f"{worker.model} is busy with context {info.context}", hint=BUSY_HINT, param="context")
    for name in ("quant", "rope_scaling", "rope_scale", "rope_base"):
        value = getattr(options, name) or 0  # the option None is the flag 0
        if getattr(flags, name) not in (None, value):
            return InvalidRequest(f"{worker.model} is busy with {name} {value}", hint=BUSY_HINT, param=name)
    return None


async def check_backend(backend: str, ref: ModelRef) -> None:
    """Probe in a child process if a backend can run a model.

    Raises the error that a load would raise if the backend cannot run the model, and NoBackend if the child process
    crashes or hangs.
    """
    try:
        probe = await children.run((*CHECK, backend, ref.id, str(ref.path)), CHECK_SECONDS)
    except TimeoutError:
        raise NoBackend(f"cannot probe backend {backend}: no result within {CHECK_SECONDS:g} s") from None
    if probe.output:
        raise msgspec.json.decode(probe.output, type=Fault).error()
    if probe.code:
        raise NoBackend(f"cannot probe backend {backend}: the probe process exited with status {probe.code}")


def check_embeddings(ref: ModelRef, requests: Sequence[Request]) -> None:
    """Raises EmbeddingsUnsupported for embeddings of a safetensors model without modules.json. The worker checks the
    other files, and the header of a GGUF file."""
    wants_embeddings = any(isinstance(request, Embed) for request in requests)
    if wants_embeddings and not ref.is_gguf and not (ref.path / MODULES).is_file():
        raise EmbeddingsUnsupported.without_pooling(ref.id)
