"""Opens the model of a Load frame: weights, tokenizer and chat template."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ... import backends
from ...engine.modelfiles import read_model
from ...engine.runner import Runner
from ..chat.grammar import GrammarCompiler
from ..chat.prompt import PromptMaker
from ..chat.template import TemplateRenderer
from ..chat.tokenizer import ChatTokenizer
from ..frames import Load, ModelInfo

# Bytes of weights per second that the slowest supported machine reads and, if necessary, quantises.
MIN_LOAD_RATE = 20e6

log = logging.getLogger(__name__)

Progress = Callable[[str, float, float], None]  # called with the fields `stage`, `done` and `more` of a Loading frame


@dataclass(slots=True)
class OpenModel:
    """A loaded model: weights, tokenizer and chat template."""

    info: ModelInfo
    runner: Runner
    tokenizer: ChatTokenizer
    renderer: TemplateRenderer
    prompts: PromptMaker
    recommended: Mapping[str, float]  # sampling parameters of the model's generation_config.json
    model_type: str = ""  # field of the model's config.json
    _grammars: GrammarCompiler | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def grammars(self) -> GrammarCompiler:
        """The grammar compiler. The first call creates it, which takes a second for a large vocabulary."""
        with self._lock:
            if self._grammars is None:
                self._grammars = GrammarCompiler(self.tokenizer, self.runner.spec.vocab_size)
            return self._grammars

    def close(self) -> None:
        """Stop the child processes of the template renderer and the grammar compiler. The engine closes the runner."""
        self.renderer.close()
        if self._grammars is not None:
            self._grammars.close()


def open_model(load: Load, progress: Progress) -> OpenModel:
    """Load a model; blocks. Raises EngineError: ModelRefused, SettingRefused or BackendUnavailable."""
    progress("reading the model files", 0.0, 0.0)
    files = read_model(Path(load.path), load.model)
    tokenizer = ChatTokenizer(files.path, files.eos_ids)
    progress("choosing a backend", 0.05, 0.0)
    choice = backends.choose(load.backend, files)
    progress(f"loading the weights ({choice.backend.name})", 0.1, files.weight_bytes / MIN_LOAD_RATE)
    runner = choice.backend.open(files, load.options)
    progress("ready", 1.0, 0.0)
    renderer = TemplateRenderer()
    prompts = PromptMaker(tokenizer, renderer)
    spec = runner.spec
    if spec.num_adapters < load.options.adapter_slots:
        log.warning("the memory has room for %d of %d adapter slots", spec.num_adapters, load.options.adapter_slots)
    info = ModelInfo(
        model=load.model,
        backend=choice.backend.name,
        device=choice.info.name,
        dtype=spec.dtype,
        quant=spec.quant,
        context=spec.max_context,
        vocab=spec.vocab_size,
        weight_bytes=spec.weight_bytes,
        token_bytes=spec.token_bytes,
        cache_bytes=spec.cache_bytes,
        cache_tokens=spec.cache_tokens,
        reason=choice.reason,
        step_seconds=spec.step_seconds,
        warnings=spec.warnings,
    )
    return OpenModel(info, runner, tokenizer, renderer, prompts, files.generation, files.config.model_type)
