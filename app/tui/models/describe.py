"""The lines of the detail screen: facts about a model as pairs of a title and a text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...client import AdapterFolder, DtypeShare, Fit, Inspection, LoadedModel, ModelFacts, TemplateVerdict
from ...sizes import size
from ..text import first_texts, joined, phrase
from .assessment import refusal
from .facts import size_text, speed_text, tokens_text

Line = tuple[str, str]  # an empty title continues the line before; a line with an empty text is not shown
MAX_NAMES = 3  # file names in one line


def stored(facts: ModelFacts) -> list[Line]:
    """The provenance and the properties of a model or an adapter on this machine."""
    return [
        ("repository", facts.repository),
        ("revision", facts.revision),
        ("stored", facts.stored),
        ("size", size(facts.size)),
        ("format", facts.description if facts.backend else ""),
        ("backend", facts.backend),
        ("context", tokens_text(facts.context or 0)),
        ("weights", _weights(facts.weights)),
        ("embeddings", facts.embeddings),
        ("licence", facts.licence),
        ("chat template", _template(facts.template)),
        ("aliases", ", ".join(facts.aliases)),
        ("settings", ", ".join(f"{name} = {value}" for name, value in facts.settings.items())),
        *titled("problem", facts.problems),
        *titled("warning", facts.warnings),
        ("folder", facts.path),
    ]


def adapter(folder: AdapterFolder) -> list[Line]:
    """The base model and the rank of an adapter."""
    return [("base model", folder.base or "not named"), ("rank", str(folder.rank or "unknown"))]


def files(facts: ModelFacts) -> list[Line]:
    """The files of a model with their sizes and hashes."""
    texts = [f"{file.name}  {size(file.size)}  {file.hash or 'no hash'}" for file in facts.files]
    return titled("files", texts)


def loaded(model: LoadedModel | None) -> list[Line]:
    """The state of a model in the memory of the daemon."""
    if model is None:
        return [("loaded", "no")]
    text = joined([model.backend, model.dtype, model.quant, size_text(model.memory)])
    return [("loaded", text), *titled("options", model.options), *titled("warning", model.warnings)]


def inspected(inspection: Inspection) -> list[Line]:
    """The properties of a model before its download."""
    return [
        ("source", inspection.source),
        ("downloaded", "yes" if inspection.local else "no"),
        ("kind", inspection.kind),
        ("architecture", inspection.architecture or "unknown"),
        ("parameters", count(inspection.parameters)),
        ("weights", size_text(inspection.bytes)),
        ("formats", _weights(inspection.dtypes)),
        ("base model", inspection.base),
        ("quantisation", inspection.quantization),
        ("context", tokens_text(inspection.context)),
        ("rope scaling", inspection.rope_scaling),
        ("embeddings", inspection.embeddings),
        ("variants", _variants(inspection)),
        ("licence", inspection.licence or "unknown"),
        ("chat template", _template(inspection.template)),
        *titled("refused", _refused(inspection)),
        *titled("warning", inspection.warnings),
        *titled("backends", _backends(inspection)),
        ("cannot run", refusal(inspection)),
    ]


def fitted(fits: Iterable[Fit]) -> list[Line]:
    """The memory that a model needs on each backend."""
    return [line for fit in fits for line in titled(f"fit on {fit.backend}", _fit(fit))]


def titled(title: str, texts: Sequence[str]) -> list[Line]:
    """The title before the first of some texts. Empty texts are omitted."""
    lines = [("", text) for text in texts if text]
    return [(title, text) for _, text in lines[:1]] + lines[1:]


def count(parameters: int | None) -> str:
    """A number of parameters, such as 596 M; empty if it is unknown."""
    if parameters is None:
        return ""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= unit:
            return f"{parameters / unit:.3g} {letter}"
    return str(parameters)


def _weights(shares: Iterable[DtypeShare]) -> str:
    return ", ".join(f"{share.dtype} {size(share.bytes)}" for share in shares)


def _template(template: TemplateVerdict | None) -> str:
    if template is None:
        return ""
    if template.status == "missing":
        return "none: chat is not possible, only plain completions"
    if template.status == "fails":
        return f"fails: {template.reason}"
    return "works" + phrase(", renders system messages", template.system) + phrase(", renders tools", template.tools)


def _variants(inspection: Inspection) -> str:
    """The other models of a GGUF repository; `org/repo:VARIANT` names one of them."""
    if len(inspection.variants) < 2:
        return ""
    return ", ".join(f"{variant.quant} {size(variant.bytes)}" for variant in inspection.variants)


def _refused(inspection: Inspection) -> list[str]:
    """The files that localllm never downloads or loads."""
    return [
        phrase(
            "{}: pickle weights could run code; never downloaded or loaded", first_texts(inspection.pickles, MAX_NAMES)
        ),
        phrase("{}: code of the repository; never downloaded or run", first_texts(inspection.code, MAX_NAMES)),
    ]


def _backends(inspection: Inspection) -> list[str]:
    texts = []
    for verdict in inspection.backends:
        answer = "yes" + phrase(", selected", verdict.backend == inspection.choice) if verdict.runs else "no"
        texts.append(f"{verdict.backend}: {answer}, {verdict.says}")
    return texts


def _fit(fit: Fit) -> list[str]:
    if not fit.runs:
        return [f"cannot run this model: {fit.reason}"]
    if not fit.free:
        return [f"does not fit: {fit.reason}"]
    first = f"fits, context up to {fit.largest_context:,} tokens" if fit.fits else f"does not fit: {fit.reason}"
    memory = [
        f"{size(fit.free)} free",
        f"weights {size(fit.weights)}",
        phrase("adapters {}", size_text(fit.adapters)),
        f"KV cache {size(fit.cache)} for {fit.context:,} tokens",
    ]
    return [joined([first, speed_text(fit.tokens_per_second or 0.0)]), joined(memory)]
