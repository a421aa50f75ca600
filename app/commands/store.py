"""`localllm show`, `verify`, `prune`, `import`, `alias` and `search`: the models on disk, and their names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from ...engine.errors import ModelRefused
from ...engine.files.model_files import ModelFiles, read_model
from .. import config
from ..errors import AppError, InvalidRequest, ModelNotFound
from ..sizes import size
from ..store import catalog, preferences, resolved
from ..store.local import adapter_refs, cache, ggufs, stored
from ..store.names import LOCAL, HubName, is_path, parse
from .console import one_line, print_json, say, table, weights_text

if TYPE_CHECKING:
    from ..store.hub.searching import Repository
    from ..store.local.verify import Verdict
    from ..store.prune import Unused
    from ..store.records import DtypeShare

GGUF_BACKEND = "llamacpp: GGUF files go to llama.cpp"
DAMAGED = 1  # exit code of verify
SENTENCES = ("problems", "warnings")  # facts of show with a line for each value
MAX_NAMES = 3  # of files without a hash


def show(name: str, as_json: bool) -> int:
    """Print the provenance of a model or an adapter: repository, revision, hashes, time, licence, settings."""
    config.load()
    facts = _facts(stored.resolve(name))
    if as_json:
        print_json(msgspec.to_builtins(facts))
        return 0
    for key, value in facts.items():
        if key not in ("files", "settings") and value not in ("", [], (), None):
            for text in value if key in SENTENCES else [_text(key, value)]:
                click.echo(f"{key:12}{one_line(text)}")
    for setting, value in facts["settings"].items():
        click.echo(f"{'setting':12}{setting}={value}")
    table(("FILE", "SIZE", "HASH"), [(file["name"], size(file["size"]), file["hash"]) for file in facts["files"]])
    return 0


def _text(key: str, value: Any) -> str:
    """A fact for people. In JSON, sizes are numbers of bytes, and a verdict has its parts."""
    match key:
        case "size":
            return size(value)
        case "weights":
            return weights_text(value)
        case "template":
            return f"{value.status} {value.reason}".strip()
    return ", ".join(value) if isinstance(value, list) else str(value)


def _facts(model: cache.ModelRef) -> dict[str, Any]:
    from ..store.adapters import base_of
    from ..store.checks.template import try_folder, try_gguf
    from ..store.inspection.models import embeddings_of, gguf_facts, licence
    from ..store.listing import problems_of, purpose, with_problem
    from ..store.local.verify import expected_hash, files_of

    files: list[dict[str, Any]] = []
    newest = 0.0
    for name, path in files_of(model):
        if path.is_file():
            digest, blob = expected_hash(path)
            newest = max(newest, blob.stat().st_mtime)
            files.append({"name": name, "size": blob.stat().st_size, "hash": digest})
    kind = stored.kind_of(model.path)
    problems = problems_of(model)
    template = try_folder(model.path) if kind == "model" else None
    named_licence = ""
    weights: tuple[DtypeShare, ...] = ()
    if kind == "gguf" and cache.is_complete(model.path):
        model = with_problem(model)  # has its context and its architecture
        template = try_gguf(model.path)
        with suppress(ModelRefused):  # a damaged header is one of the problems
            named_licence, weights = gguf_facts([file.path for file in ggufs.model_of(model.path).files])
    readable = None if problems else _readable(model)
    preferred = preferences.read()
    return {
        "id": model.id,
        "kind": kind,
        "path": str(model.path),
        "repository": cache.repository_of(model),
        "revision": model.revision,
        "stored": datetime.fromtimestamp(newest, UTC).isoformat(timespec="seconds") if newest else "",
        "size": sum(file["size"] for file in files),
        "context": model.context or None,
        "description": model.description,
        "purpose": purpose(model.path) if kind in ("model", "gguf") else None,
        "backend": GGUF_BACKEND if kind == "gguf" else "",
        "base": base_of(model.path) if kind == "adapter" else "",
        "weights": weights,
        "embeddings": embeddings_of(readable),
        "licence": named_licence or licence(model.path),
        "template": template,
        "aliases": [alias for alias, target in preferred.aliases.items() if target == model.id],
        "problems": problems,
        "warnings": [] if readable is None else list(readable.warnings),
        "settings": config.model_settings(preferred.settings, model.id),
        "files": files,
    }


def _readable(model: cache.ModelRef) -> ModelFiles | None:
    """The files of a model without problems; None for an adapter."""
    if stored.kind_of(model.path) not in ("model", "gguf"):
        return None
    try:
        return read_model(model.path, model.id)
    except ModelRefused:
        return None


def verify(names: tuple[str, ...], as_json: bool) -> int:
    """Hash the files of models and compare them with the hashes of the cache. The exit code is 1 for a difference."""
    config.load()
    from .transfer_bars import file_bar

    models = [stored.resolve(name) for name in names] or _all_stored()
    results: list[dict[str, Any]] = []
    for model in models:
        with file_bar(bool(model.revision) and not as_json and sys.stderr.isatty()) as show_progress:
            verdicts = _verify(model, show_progress)
        is_correct = all(verdict.status in ("ok", "unknown") for verdict in verdicts)
        results.append({"id": model.id, "ok": is_correct, "files": [asdict(verdict) for verdict in verdicts]})
        if not as_json:
            _print_verdicts(model, verdicts)
    if as_json:
        print_json(results)
    return 0 if all(result["ok"] for result in results) else DAMAGED


def _all_stored() -> list[cache.ModelRef]:
    """Every model and adapter, also those with missing files."""
    from ..store import listing

    models = [model for model in listing.listed() if model.bundled or model.revision]
    return [*models, *adapter_refs.available()]


def _verify(model: cache.ModelRef, show_progress: Callable[[str, int, int], None]) -> list[Verdict]:
    from ..store.local.verify import files_of, verify_file

    files = files_of(model)
    total = sum(path.stat().st_size for _, path in files if path.is_file())
    done = 0
    verdicts = []
    for name, path in files:

        def add(count: int, name: str = name) -> None:
            nonlocal done
            done += count
            show_progress(name, done, total)

        verdicts.append(verify_file(name, path, add))
    return verdicts


def _print_verdicts(model: cache.ModelRef, verdicts: list[Verdict]) -> None:
    wrong = [verdict for verdict in verdicts if verdict.status in ("damaged", "missing")]
    for verdict in wrong:
        say(f"{model.id}: {verdict.file} is {verdict.status}")
    if wrong:
        say(f"hint: {_repair(model, wrong)}")
        return
    unknown = [verdict.file for verdict in verdicts if verdict.status == "unknown"]
    names = one_line(", ".join(unknown[:MAX_NAMES])) + (", …" if len(unknown) > MAX_NAMES else "")
    note = f"; {len(unknown)} have no hash of a hub, so nothing vouches for their bytes: {names}" if unknown else ""
    click.echo(f"{model.id}: {len(verdicts) - len(unknown)} files are correct{note}")


def _repair(model: cache.ModelRef, wrong: list[Verdict]) -> str:
    """The commands that repair a model."""
    if model.bundled:
        return "install localllm again"
    if not model.revision:
        return "copy the folder again"
    if model.id.startswith(f"{LOCAL}/"):
        return f"localllm rm {model.id}, then import the model again"
    if all(verdict.status == "missing" for verdict in wrong):
        return f"localllm pull {model.id}"
    return f"localllm rm {model.id}, then localllm pull {model.id}"


def prune(dry_run: bool, yes: bool, everything: bool, as_json: bool) -> int:
    """Print the files in the cache that nothing uses, and delete them after a confirmation."""
    config.load()
    from ..store import prune as pruning

    unused = pruning.find_unused(everything=everything)
    total = sum(item.disk_bytes for item in unused)
    is_deleted = bool(unused) and not dry_run and (yes or _confirms(len(unused), total, as_json))
    freed = pruning.delete(unused) if is_deleted else 0
    if as_json:
        items = [_unused_json(item) for item in unused]
        print_json({"unused": items, "bytes": total, "deleted": is_deleted, "freed": freed})
        return 0
    if unused:
        table(
            ("REPOSITORY", "KIND", "SIZE", "FILE"),
            [(item.repo, item.kind, size(item.disk_bytes), item.paths[0].name) for item in unused],
        )
    if is_deleted:
        say(f"freed {size(freed)}")
    elif unused:
        command = "localllm prune --all --yes" if everything else "localllm prune --yes"
        say(f"{size(total)} can be freed; {command} deletes these files")
    else:
        say("nothing to delete" if everything else "nothing to delete; --all includes files of the last 24 hours")
    return 0


def _unused_json(item: Unused) -> dict[str, object]:
    return {**asdict(item), "folder": str(item.folder), "paths": [str(path) for path in item.paths]}


def _confirms(count: int, total: int, as_json: bool) -> bool:
    """Ask for a confirmation. Without a terminal the answer is no."""
    if as_json or not sys.stdin.isatty():
        return False
    return click.confirm(f"Delete {count} unused files and free {size(total)}?", err=True)


def import_(path: str, name: str, copy: bool, as_json: bool) -> int:
    """Add a model folder to the store."""
    config.load()
    from ..store.importing import import_model
    from .transfer_bars import file_bar

    with file_bar(copy and not as_json and sys.stderr.isatty()) as show:
        model = import_model(Path(path), name, copy=copy, progress=show)
    if as_json:
        facts = {"id": model.id, "path": str(model.path), "size": model.size, "copied": copy}
        print_json(facts | resolved.use_of(model), indent=None)
        return 0
    files = f"copies of {size(model.size)}" if copy else f"links to {Path(path).expanduser().absolute()}"
    say(resolved.outcome(model, files))
    return 0


def alias(name: str | None, model: str | None, remove: bool, as_json: bool) -> int:
    """Print all aliases, or add, replace or remove one."""
    config.load()
    aliases = preferences.read().aliases
    if remove and (name is None or model is not None):
        raise InvalidRequest("--rm takes the name of one alias", hint="for example: localllm alias small --rm")
    if name is not None and remove:
        if name not in aliases:
            hint = f"the aliases are {', '.join(sorted(aliases))}" if aliases else "there are no aliases"
            raise ModelNotFound(f"{name[:200]!r} is not an alias", hint=hint, param="name")
        preferences.set_alias(name, None)
    elif name is not None and model is not None:
        _set_alias(name, model)
    elif name is not None:
        raise InvalidRequest("the model of the alias is missing", hint=f"for example: localllm alias {name} guide")
    aliases = preferences.read().aliases
    if as_json:
        print_json(aliases)
    elif name is not None:
        say(f"removed {name}" if remove else f"{name} is now {aliases[name]}")
    elif aliases:
        table(("ALIAS", "MODEL"), sorted(aliases.items()))
    else:
        say("there are no aliases; for example: localllm alias small Qwen/Qwen3-0.6B")
    return 0


def _set_alias(name: str, model: str) -> None:
    catalog.check_alias(name)
    target = parse(model)
    if str(target) in preferences.read().aliases:
        raise InvalidRequest(f"{model} is itself an alias", hint="name its model", param="model")
    text = str(Path(model).expanduser().absolute()) if is_path(model) else str(target)
    if isinstance(target, HubName) and target.file:
        text = model  # an address: the name of the repository does not select the file
    if is_path(text):
        if resolved.find(text, allow_path=True).kind != "adapter":
            cache.resolve(text, allow_path=True)  # raises ModelNotFound for a folder without a model
    elif resolved.find(text).kind == "missing":
        if catalog.expand(target) is None:  # a name that pull refuses
            raise ModelNotFound(f"model {text[:200]!r} is not on this machine", hint=cache.hint(text), param="model")
        say(f"{text} is not on this machine yet; localllm pull {text} downloads it")
    preferences.set_alias(name, text)


def search(words: tuple[str, ...], limit: int, offline: bool, as_json: bool) -> int:
    """Print the entries of the catalog. With search words, also print repositories on Hugging Face."""
    config.load()
    from ..store.hub.searching import search_catalog, search_hub

    text = " ".join(words)
    entries = search_catalog(text)
    problem: AppError | None = None
    repositories: list[Repository] = []
    if text and not offline:
        try:
            repositories = search_hub(text, limit)
        except AppError as error:
            problem = error
    if as_json:
        result = {
            "catalog": [{"name": name, **_entry_json(entry)} for name, entry in entries.items()],
            "hub": [asdict(repository) for repository in repositories],
            "error": problem.message if problem else None,
        }
        print_json(result)
    else:
        _print_search(entries, repositories)
        if not entries and not repositories and problem is None:
            say("no model has these words in its name")
    if problem is not None and not as_json:
        raise problem
    return problem.exit_code if problem else 0


def _entry_json(entry: catalog.Entry) -> dict[str, Any]:
    sizes = {"size": round(entry.size * catalog.GB), "memory": round(entry.memory * catalog.GB)}
    return {**msgspec.to_builtins(entry), **sizes}


def _hub_row(item: Repository) -> tuple[str, ...]:
    weights = size(item.size) if item.size else ""
    return (item.id, weights, str(item.downloads), item.licence, "gated" if item.gated else "")


def _gguf_row(item: Repository) -> tuple[str, ...]:
    notes = ["gated"] if item.gated else []
    return (item.id, str(item.downloads), item.licence, ", ".join([*notes, *item.quants]))


def _print_search(entries: dict[str, catalog.Entry], repositories: list[Repository]) -> None:
    if entries:
        rows = []
        for name, entry in entries.items():
            notes = ", ".join(filter(None, ("gated" if entry.gated else "", entry.description)))
            rows.append((name, _about(entry.size), _about(entry.memory), entry.licence, entry.repository, notes))
        table(("NAME", "SIZE", "MEMORY", "LICENCE", "REPOSITORY", ""), rows)
    if safetensors := [_hub_row(item) for item in repositories if "safetensors" in item.formats]:
        table(("ON HUGGING FACE", "SIZE", "DOWNLOADS", "LICENCE", ""), safetensors)
    if gguf := [_gguf_row(item) for item in repositories if "gguf" in item.formats]:
        table(("GGUF ON HUGGING FACE", "DOWNLOADS", "LICENCE", "QUANTISATIONS"), gguf)
    if example := next((item for item in repositories if item.quants), None):
        say(f"one quantisation: localllm pull {example.id}:{example.quants[0]}")


def _about(gigabytes: float) -> str:
    """An approximate size of the catalog; 0 means unknown."""
    return f"about {gigabytes:g} GB" if gigabytes else "unknown"
