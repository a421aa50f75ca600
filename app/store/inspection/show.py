"""The facts about a model or an adapter on this machine: provenance, files with their hashes, licence and settings."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime

from ....engine.errors import ModelRefused
from ....engine.files.model_files import ModelFiles, read_model
from ... import config
from .. import listing, preferences
from ..adapters import base_of
from ..checks.template import try_folder, try_gguf
from ..local.refs import ModelRef
from ..local.verify import expected_hash
from ..records import DtypeShare, ModelFacts, StoredFile, TemplateVerdict
from ..resolved import stored
from .models import embeddings_of, gguf_facts, licence

GGUF_BACKEND = "llamacpp: GGUF files go to llama.cpp"


def show(name: str) -> ModelFacts:
    """Raises ModelNotFound, or InvalidRequest for a path that is no text."""
    ref = stored(name)
    is_model = ref.kind in ("model", "gguf")
    blobs = [(name, *expected_hash(path)) for name, path in ref.files if path.is_file()]
    files = [StoredFile(name, blob.stat().st_size, digest) for name, digest, blob in blobs]
    newest = max((blob.stat().st_mtime for _, _, blob in blobs), default=0.0)
    problems = listing.problems_of(ref)
    readable = _readable(ref) if is_model and not problems else None
    entry = listing.entry_of(ref)
    preferred = preferences.read()
    named_licence, weights = _gguf_facts(ref)
    return ModelFacts(
        id=ref.id,
        kind=ref.kind,
        path=str(ref.path),
        repository=ref.repository,
        revision=ref.revision,
        stored=datetime.fromtimestamp(newest, UTC).isoformat(timespec="seconds") if newest else "",
        size=sum(file.size for file in files),
        context=entry.context or None,
        description=entry.description,
        purpose=entry.purpose if is_model else None,
        backend=GGUF_BACKEND if ref.kind == "gguf" else "",
        base=base_of(ref) if ref.kind == "adapter" else "",
        weights=weights,
        embeddings=embeddings_of(readable),
        licence=named_licence or licence(ref),
        template=_template(ref),
        aliases=[alias for alias, target in preferred.aliases.items() if target == ref.id],
        problems=problems,
        warnings=[] if readable is None else list(readable.warnings),
        settings=config.model_settings(preferred.settings, ref.id),
        files=files,
    )


def _template(ref: ModelRef) -> TemplateVerdict | None:
    if ref.kind == "model":
        return try_folder(ref.path)
    return try_gguf(ref.path) if ref.kind == "gguf" and ref.is_complete else None


def _gguf_facts(ref: ModelRef) -> tuple[str, list[DtypeShare]]:
    """The licence and the weights in the headers of a GGUF model; empty for other files."""
    if ref.kind == "gguf" and ref.is_complete:
        with suppress(ModelRefused):  # a damaged header is one of the problems
            licence, weights = gguf_facts(ref.weight_files)
            return licence, list(weights)
    return "", []


def _readable(ref: ModelRef) -> ModelFiles | None:
    with suppress(ModelRefused):
        return read_model(ref.path, ref.id)
    return None
