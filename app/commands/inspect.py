"""`localllm inspect`: the facts about a model before it is downloaded or loaded, as text or JSON."""

from __future__ import annotations

import click

from .. import config
from ..errors import ModelUnusable
from ..sizes import size
from ..store.inspection.models import inspect as inspect_model
from ..store.records import Inspection, TemplateVerdict, Variant
from .console import one_line, print_json, weights_text


def inspect(name: str, as_json: bool) -> int:
    """Print the inspection. The exit code is 5 if no backend of this machine runs the model, or its files are bad."""
    config.load()
    inspection = inspect_model(name)
    if as_json:
        print_json(inspection)
    else:
        _print(inspection)
    return 0 if inspection.usable else ModelUnusable.exit_code


def _print(inspection: Inspection) -> None:
    for title, text in _lines(inspection):
        click.echo(f"{title:<14} {one_line(text)}")


def _lines(inspection: Inspection) -> list[tuple[str, str]]:
    """The title and the text of each line. A title is empty if the line continues the line before."""
    facts = {
        "name": inspection.name,
        "source": inspection.source + ("" if inspection.local else ", not downloaded"),
        "kind": inspection.kind,
        "architecture": inspection.architecture or "unknown",
        "parameters": _count(inspection.parameters),
        "weights": _weights(inspection),
        "licence": inspection.licence or "unknown",
        **(_of_adapter(inspection) if inspection.kind == "adapter" else _of_model(inspection)),
        "embeddings": inspection.embeddings,
        "variants": _variants(inspection.variants),
        "chat template": _template(inspection.template) if inspection.template else "",
    }
    several = {
        "refused": _refused(inspection),
        "problem": list(inspection.problems),
        "warning": list(inspection.warnings),
        "backends": _backends(inspection),
        "hint": list(filter(None, [inspection.hint])),
    }
    lines = [(title, text) for title, text in facts.items() if text]
    return lines + [line for title, texts in several.items() for line in _titled(title, texts)]


def _of_adapter(inspection: Inspection) -> dict[str, str]:
    unnamed = "not named" if inspection.rank else "unknown"  # a file that cannot be read has rank 0
    return {"base model": inspection.base or unnamed, "rank": str(inspection.rank or "unknown")}


def _of_model(inspection: Inspection) -> dict[str, str]:
    context = f"{inspection.context} tokens" if inspection.context else "unknown"
    if inspection.rope_scaling:
        context += f" (rope scaling: {inspection.rope_scaling})"
    return {"quantisation": inspection.quantization or "none", "context": context}


def _variants(variants: tuple[Variant, ...]) -> str:
    return ", ".join(f"{variant.quant} {size(variant.bytes)}" for variant in variants) if len(variants) > 1 else ""


def _titled(title: str, texts: list[str]) -> list[tuple[str, str]]:
    return [("" if index else title, text) for index, text in enumerate(texts)]


def _count(parameters: int | None) -> str:
    """A number of parameters, such as 596 M."""
    if parameters is None:
        return "unknown"
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= unit:
            return f"{parameters / unit:.3g} {letter}"
    return str(parameters)


def _weights(inspection: Inspection) -> str:
    types = weights_text(inspection.dtypes)
    return f"{size(inspection.bytes)} ({types})" if types else size(inspection.bytes)


def _template(template: TemplateVerdict) -> str:
    if template.status == "missing":
        return "none: chat is not possible, only plain completions"
    if template.status == "fails":
        return f"fails: {template.reason}"
    abilities = [name for name, present in (("system messages", template.system), ("tools", template.tools)) if present]
    return f"works, with {' and '.join(abilities)}" if abilities else "works"


def _refused(inspection: Inspection) -> list[str]:
    """The files that localllm never downloads or loads."""
    refused = []
    if inspection.pickles:
        refused.append(f"{_some(inspection.pickles)}: pickle weights could run code; never downloaded or loaded")
    if inspection.code:
        refused.append(f"{_some(inspection.code)}: code of the repository; never downloaded or run")
    return refused


def _some(names: tuple[str, ...]) -> str:
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")


def _backends(inspection: Inspection) -> list[str]:
    texts = []
    for verdict in inspection.backends:
        chosen = " (selected)" if verdict.backend == inspection.choice else ""
        texts.append(f"{verdict.backend:<9} {'yes' if verdict.runs else 'no'}: {verdict.says}{chosen}")
    return texts
