"""The facts about a model or an adapter on this machine: provenance, files with their hashes, licence and settings."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ....engine.errors import ModelRefused
from ....engine.files.families import FAMILIES
from ....engine.files.model_files import ModelFiles, read_model
from ... import config
from .. import listing, preferences
from ..adapters import base_of
from ..checks.template import try_folder, try_gguf
from ..local.refs import ModelRef
from ..local.verify import expected_hash
from ..records import DtypeShare, ListedModel, ModelFacts, StoredFile, TemplateVerdict
from ..resolved import stored
from .models import embeddings_of, gguf_facts, licence

GGUF_BACKEND = "llamacpp: GGUF files go to llama.cpp"
OTHER_CODE = "transformers' code, on Apple silicon mlx-lm: localllm has no code of its own for this architecture"


def show(name: str) -> ModelFacts:
    """Raises ModelNotFound, or InvalidRequest for a path that is no text."""
    ref = stored(name)
    entry = listing.entry_of(ref)
    problems = listing.problems_of(ref)
    preferred = preferences.read()
    named_licence, weights = _gguf_facts(ref)
    files = [_stored_file(name, path) for name, path in ref.files if path.is_file()]
    return ModelFacts(
        id=ref.id,
        kind=ref.kind,
        path=str(ref.path),
        repository=ref.repository,
        revision=ref.revision,
        stored=_time_of(ref),
        size=sum(file.size for file in files),
        context=entry.context or None,
        description=entry.description,
        licence=named_licence or licence(ref),
        weights=weights,
        template=_template(ref),
        aliases=[alias for alias, target in preferred.aliases.items() if target == ref.id],
        problems=problems,
        settings=config.model_settings(preferred.settings, ref.id),
        files=files,
        **_of_kind(ref, entry, problems),
    )


def _of_kind(ref: ModelRef, entry: ListedModel, problems: list[str]) -> dict[str, Any]:
    """The facts that only an adapter, or only a model has."""
    if ref.kind == "adapter":
        return {"base": base_of(ref)}
    if ref.kind == "weights":
        return {}
    facts = {"purpose": entry.purpose, "backend": GGUF_BACKEND if ref.kind == "gguf" else ""}
    files = None if problems else _readable(ref)
    if files is None:
        return facts
    if ref.kind == "model" and files.config.model_type not in FAMILIES:
        facts["backend"] = OTHER_CODE
    return {**facts, "embeddings": embeddings_of(files), "warnings": list(files.warnings)}


def _stored_file(name: str, path: Path) -> StoredFile:
    digest, blob = expected_hash(path)
    return StoredFile(name, blob.stat().st_size, digest)


def _time_of(ref: ModelRef) -> str:
    """The time at which the last file was stored, in ISO 8601; empty without a file."""
    times = [expected_hash(path)[1].stat().st_mtime for _, path in ref.files if path.is_file()]
    return datetime.fromtimestamp(max(times), UTC).isoformat(timespec="seconds") if times else ""


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
