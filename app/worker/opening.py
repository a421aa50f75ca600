"""Opens the model of a Load frame: weights, tokenizer and chat template."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ...backends.shared_settings import Applied, choose_for, without_refused
from ...engine.files.model_files import ModelFiles, read_model
from ...engine.files.pooling import Pooling, read_pooling
from ...engine.runner import Runner
from ..chat import sampling
from ..chat.prompt import PromptMaker
from ..chat.template.renderer import TemplateRenderer
from ..chat.tokenizer.base import Tokenizer
from ..chat.tokenizer.huggingface import ChatTokenizer
from ..frames import Load, ModelInfo
from ..grammar.compiler import GrammarCompiler
from ..purpose import purpose_of

# Bytes of weights per second that the slowest supported machine reads and, if necessary, quantises.
MIN_LOAD_RATE = 20e6

log = logging.getLogger(__name__)

Open = Callable[[], Applied[Runner]]
Progress = Callable[[str, float, float], None]  # called with the fields `stage`, `done` and `more` of a Loading frame


@dataclass(slots=True)
class OpenModel:
    """A loaded model: weights, tokenizer and chat template."""

    info: ModelInfo
    runner: Runner
    tokenizer: Tokenizer
    renderer: TemplateRenderer
    prompts: PromptMaker
    recommended: Mapping[str, float]  # sampling parameters that the model's files recommend
    suppressed: tuple[int, ...] = ()  # tokens that an answer must not have
    model_type: str = ""  # architecture of the model, as in its files; empty if models of several families have it
    pooling: Pooling | None = None  # None: the files describe no embeddings
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


def _open_gguf(open_runner: Open, files: ModelFiles) -> tuple[Applied[Runner], Tokenizer]:
    """The runner and the tokenizer of a GGUF file.

    llama.cpp reads the vocabulary with the weights, and again for the tokenizer, which outlives the runner. Both happen
    at the same time: a large vocabulary takes half a second.
    """
    from ..chat.tokenizer.gguf import open_tokenizer  # imports llama.cpp

    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        tokenizer = pool.submit(open_tokenizer, files)
        runner = open_runner()
        stack.callback(runner.result.close)
        opened = runner, tokenizer.result()
        stack.pop_all()
    return opened


def _open_safetensors(open_runner: Open, files: ModelFiles) -> tuple[Applied[Runner], Tokenizer]:
    tokenizer = ChatTokenizer(files.path, files.eos_ids)
    return open_runner(), tokenizer


def open_model(load: Load, progress: Progress) -> OpenModel:
    """Load a model; blocks. Raises EngineError: ModelRefused, SettingRefused or BackendUnavailable."""
    progress("reading the model files", 0.0, 0.0)
    files = read_model(Path(load.path), load.model)
    progress("choosing a backend", 0.05, 0.0)
    chosen = choose_for(load.backend, files, load.shared)
    choice = chosen.result
    progress(f"loading the weights ({choice.backend.name})", 0.1, files.weight_bytes / MIN_LOAD_RATE)
    open_files = _open_gguf if files.gguf else _open_safetensors
    open_runner = partial(choice.backend.open, files)
    loaded, tokenizer = open_files(partial(without_refused, open_runner, load.model, load.options, load.shared), files)
    runner = loaded.result
    progress("ready", 1.0, 0.0)
    renderer = TemplateRenderer()
    prompts = PromptMaker(tokenizer, renderer)
    spec = runner.spec
    pooling = read_pooling(files)
    embeds = pooling is not None and not pooling.problem and pooling.size == spec.hidden_size
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
        purpose=purpose_of(tokenizer.templates, pooling, headless=files.headless),
        embedding_size=spec.hidden_size if embeds else 0,
        step_seconds=spec.step_seconds,
        unapplied=(*chosen.unapplied, *loaded.unapplied),
        warnings=(*chosen.warnings, *loaded.warnings, *spec.warnings, *tokenizer.warnings),
        sampling=sampling.defaults(files.generation),
    )
    return OpenModel(
        info,
        runner,
        tokenizer,
        renderer,
        prompts,
        files.generation,
        files.suppressed,
        _model_type(files),
        pooling,
    )


def _model_type(files: ModelFiles) -> str:
    """The architecture. GGUF files of Mistral and others have that of Llama, which says nothing about the family."""
    architecture = files.config.model_type
    return "" if files.gguf and architecture == "llama" else architecture
