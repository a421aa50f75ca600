"""`localllm show`, `verify`, `prune`, `import`, `alias` and `search`: the models on disk, and their names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from .. import config
from ..errors import InvalidRequest
from ..sizes import size
from ..store import listing, preferences, resolved
from ..store.changes import user_choices
from ..store.local import snapshots
from ..store.local.finding import find
from ..store.local.refs import ModelRef
from ..store.local.verify import WRONG
from ..store.names import LOCAL
from ..store.records import CatalogMatch, FileVerdict, HubMatch, Pruning, SearchResult, Verification
from .console import one_line, print_json, say, table, weights_text

DAMAGED = 1  # exit code of verify
TABLES = ("files", "settings")  # facts of show that are not lines
SENTENCES = ("problems", "warnings")  # facts of show with a line for each value
MAX_NAMES = 3  # number of files without a hash that are named


def show(name: str, as_json: bool) -> int:
    """Print the provenance of a model or an adapter: repository, revision, hashes, time, licence, settings."""
    config.load()
    from ..store.inspection.show import show as facts_of

    facts = facts_of(name)
    if as_json:
        print_json(facts)
        return 0
    for key, value in msgspec.structs.asdict(facts).items():
        if value and key not in TABLES:
            for text in value if key in SENTENCES else [_text(key, value)]:
                click.echo(f"{key:12}{one_line(text)}")
    for setting, value in facts.settings.items():
        click.echo(f"{'setting':12}{setting}={value}")
    table(("FILE", "SIZE", "HASH"), [(file.name, size(file.size), file.hash) for file in facts.files])
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


def verify(names: tuple[str, ...], as_json: bool) -> int:
    """Hash the files of models and compare them with the hashes of the cache. The exit code is 1 for a difference."""
    config.load()
    from ..store.local.verify import verify as compare
    from .transfer_bars import file_bar

    results = []
    for ref in [resolved.stored(name) for name in names] or _all_stored():
        with file_bar(bool(ref.revision) and not as_json and sys.stderr.isatty()) as show_progress:
            results.append(compare(ref, show_progress))
        if not as_json:
            _print_verdicts(ref, results[-1])
    if as_json:
        print_json(results)
    return 0 if all(result.ok for result in results) else DAMAGED


def _all_stored() -> list[ModelRef]:
    """Every model and adapter, also those with missing files."""
    models = [ref for ref, _ in listing.examined() if ref.bundled or ref.revision]
    return [*models, *snapshots.adapters()]


def _print_verdicts(ref: ModelRef, result: Verification) -> None:
    for problem in result.problems:
        say(f"{ref.id}: {problem}")
    if result.problems:
        say(f"hint: {_repair(ref, result.files)}")
        return
    unknown = [verdict.file for verdict in result.files if verdict.status == "unknown"]
    names = one_line(", ".join(unknown[:MAX_NAMES])) + (", …" if len(unknown) > MAX_NAMES else "")
    note = f"; {len(unknown)} have no hash of a hub, so nothing vouches for their bytes: {names}" if unknown else ""
    click.echo(f"{ref.id}: {len(result.files) - len(unknown)} files are correct{note}")


def _repair(ref: ModelRef, verdicts: list[FileVerdict]) -> str:
    """The commands that repair a model."""
    if ref.bundled:
        return "install localllm again"
    if not ref.revision:
        return "copy the folder again"
    if ref.id.startswith(f"{LOCAL}/"):
        return f"localllm rm {ref.id}, then import the model again"
    if {verdict.status for verdict in verdicts}.intersection(WRONG) == {"missing"}:
        return f"localllm pull {ref.id}"
    return f"localllm rm {ref.id}, then localllm pull {ref.id}"


def prune(dry_run: bool, yes: bool, everything: bool, as_json: bool) -> int:
    """Print the files in the cache that nothing uses, and delete them after a confirmation."""
    config.load()
    from ..store.changes.prune import prune as delete_unused

    def confirm(count: int, total: int) -> bool:
        """Without a terminal the answer is no."""
        if dry_run or yes or as_json or not sys.stdin.isatty():
            return yes and not dry_run
        return click.confirm(f"Delete {count} unused files and free {size(total)}?", err=True)

    result = delete_unused(everything=everything, confirm=confirm)
    if as_json:
        print_json(result)
        return 0
    if result.unused:
        rows = [(item.repo, item.kind, size(item.disk_bytes), Path(item.paths[0]).name) for item in result.unused]
        table(("REPOSITORY", "KIND", "SIZE", "FILE"), rows)
    say(_outcome(result, everything))
    return 0


def _outcome(result: Pruning, everything: bool) -> str:
    if result.deleted:
        return f"freed {size(result.freed)}"
    if result.unused:
        command = "localllm prune --all --yes" if everything else "localllm prune --yes"
        return f"{size(result.bytes)} can be freed; {command} deletes these files"
    return "nothing to delete" if everything else "nothing to delete; --all includes files of the last 24 hours"


def import_(path: str, name: str, copy: bool, as_json: bool) -> int:
    """Add a model folder to the store."""
    config.load()
    from ..store.changes.importing import describe, import_model
    from .transfer_bars import file_bar

    with file_bar(copy and not as_json and sys.stderr.isatty()) as show:
        model = import_model(Path(path), name, copy=copy, progress=show)
    if as_json:
        print_json(describe(model, copied=copy), indent=None)
        return 0
    files = f"copies of {size(model.size)}" if copy else f"links to {Path(path).expanduser().absolute()}"
    say(resolved.outcome(model, files))
    return 0


def alias(name: str | None, model: str | None, remove: bool, as_json: bool) -> int:
    """Print all aliases, or add, replace or remove one."""
    config.load()
    line = _change_alias(name, model, remove)
    aliases = preferences.read().aliases
    if as_json:
        print_json(aliases)
    elif line:
        say(line)
    elif aliases:
        table(("ALIAS", "MODEL"), sorted(aliases.items()))
    else:
        say("there are no aliases; for example: localllm alias small Qwen/Qwen3-0.6B")
    return 0


def _change_alias(name: str | None, model: str | None, remove: bool) -> str:
    """Returns the sentence about the change; empty without a change."""
    if remove and (name is None or model is not None):
        raise InvalidRequest("--rm takes the name of one alias", hint="for example: localllm alias small --rm")
    if name is None:
        return ""
    if remove:
        user_choices.remove_alias(name)
        return f"removed {name}"
    if model is None:
        raise InvalidRequest("the model of the alias is missing", hint=f"for example: localllm alias {name} guide")
    target = user_choices.set_alias(name, model)
    if find(target, allow_path=True) is None:
        say(f"{target} is not on this machine yet; localllm pull {target} downloads it")
    return f"{name} is now {target}"


def search(words: tuple[str, ...], limit: int, offline: bool, as_json: bool) -> int:
    """Print the entries of the catalog. With search words, also print repositories on Hugging Face."""
    config.load()
    from ..store.hub import searching

    result, error = searching.search(" ".join(words), limit, offline)
    if as_json:
        print_json(result)
        return error.exit_code if error else 0
    _print_search(result)
    if error is not None:
        raise error
    if not (result.catalog or result.hub):
        say("no model has these words in its name")
    return 0


def _print_search(result: SearchResult) -> None:
    if result.catalog:
        header = ("NAME", "SIZE", "MEMORY", "LICENCE", "REPOSITORY", "")
        table(header, [_catalog_row(entry) for entry in result.catalog])
    if safetensors := [_hub_row(item) for item in result.hub if "safetensors" in item.formats]:
        table(("ON HUGGING FACE", "SIZE", "DOWNLOADS", "LICENCE", ""), safetensors)
    if gguf := [_gguf_row(item) for item in result.hub if "gguf" in item.formats]:
        table(("GGUF ON HUGGING FACE", "DOWNLOADS", "LICENCE", "QUANTISATIONS"), gguf)
    if example := next((item for item in result.hub if item.quants), None):
        say(f"one quantisation: localllm pull {example.id}:{example.quants[0]}")


def _catalog_row(entry: CatalogMatch) -> tuple[str, ...]:
    notes = ", ".join(filter(None, ("gated" if entry.gated else "", entry.description)))
    return (entry.name, _about(entry.size), _about(entry.memory), entry.licence, entry.repository, notes)


def _hub_row(item: HubMatch) -> tuple[str, ...]:
    weights = size(item.size) if item.size else ""
    return (item.id, weights, str(item.downloads), item.licence, "gated" if item.gated else "")


def _gguf_row(item: HubMatch) -> tuple[str, ...]:
    notes = ["gated"] if item.gated else []
    return (item.id, str(item.downloads), item.licence, ", ".join([*notes, *item.quants]))


def _about(num_bytes: int) -> str:
    """An approximate size of the catalog; 0 means unknown."""
    return f"about {num_bytes / 1e9:g} GB" if num_bytes else "unknown"
