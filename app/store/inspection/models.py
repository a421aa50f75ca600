"""Inspects models, adapters and GGUF files by their configuration and headers. Reads no weights, runs no code of them.

A folder with the small files of a repository, and with sparse files for its weights, is inspected like a model: see
checks/skeleton.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from .... import backends
from ....engine.errors import ModelRefused
from ....engine.files.adapter_files import read_adapter_header
from ....engine.files.gguf import GgufTensor
from ....engine.files.gguf_names import gguf_hint
from ....engine.files.json_files import read_json
from ....engine.files.model_files import ModelFiles, read_model, read_tensors
from ....engine.files.pooling import read_pooling
from ....engine.files.tensor_files import StoredTensor, read_header
from ....engine.files.weight_files import OTHER_FORMAT, PARAMS, PICKLE_SUFFIXES, SINGLE
from ....engine.runner import Unavailable
from ...errors import ModelUnusable
from ...paths import RENAME, problem_of_name
from ..checks import tokenizer
from ..checks.files import check, check_gguf, missing_tensor
from ..checks.headers import read_gguf_file
from ..checks.template import try_folder, try_gguf
from ..checks.tokenizer import TOKENIZER
from ..local.ggufs import StoredFile, files_in, is_adapter
from ..local.refs import ModelRef, read_ref
from ..records import BackendVerdict, DtypeShare, Inspection, Variant
from ..selection import NO_CONFIG, default_quant, gguf_models, gguf_quant, gguf_variants
from .opening import Origin, opened
from .tensors import dtype_shares, num_parameters

SAFETENSORS = ".safetensors"
CODE_SUFFIX = ".py"
README = "README.md"
MAX_README = 2**20  # bytes
_FRONT_MATTER = re.compile(r"\A---\r?\n(.*?)\r?\n---", re.DOTALL)
_LICENCE = re.compile(r"^license(?:_name)?:[ \t]*[\"']?([A-Za-z0-9][\w .+-]{0,80})", re.MULTILINE)


def inspect(name: str) -> Inspection:
    """Inspect a model, an adapter or a GGUF file by its name: on this machine, or before it is downloaded.

    Raises ModelNotFound, ModelUnusable, InvalidRequest or DownloadFailed.
    """
    try:
        with opened(name) as (path, origin):
            return inspect_path(path, origin)
    except ModelRefused as error:
        raise ModelUnusable(str(error), hint=error.hint, param="model") from error


def inspect_path(path: Path, origin: Origin) -> Inspection:
    """Inspect a model folder, an adapter folder or a GGUF file.

    Raises ModelRefused if it is none of these, or if its path is no text.
    """
    if problem := problem_of_name(path):
        raise ModelRefused(problem, RENAME)
    ref = read_ref(path, origin.name)
    origin = replace(origin, files=origin.files or _names(path), licence=origin.licence or licence(ref))
    if ref.kind == "adapter":
        return _inspect_adapter(ref, origin)
    if ref.is_gguf:
        return _inspect_gguf(ref.weight_files, origin)
    if ref.kind == "gguf":
        files = files_in(path)
        variants = origin.variants or gguf_variants((file.name, file.size) for file in files)
        return _inspect_gguf(_one_model(origin.name, files, variants), replace(origin, variants=variants))
    if ref.kind == "model":
        return _inspect_model(ref, origin)
    return _inspect_weights(path, origin)


def licence(ref: ModelRef) -> str:
    """The licence in the front matter of README.md; empty if there is none."""
    file = ref.folder / README
    try:
        if not file.is_file() or file.stat().st_size > MAX_README:
            return ""
        text = file.read_text("utf-8", "replace")
    except OSError:
        return ""
    header = _FRONT_MATTER.match(text)
    values: list[str] = _LICENCE.findall(header[1]) if header else []
    named = [value.strip() for value in values if value.strip() != "other"]
    return named[0] if named else "".join(values[:1])


def _one_model(name: str, files: list[StoredFile], variants: tuple[Variant, ...]) -> list[Path]:
    """The files of one model, which represents the variants. Raises ModelRefused if several models could do this."""
    selected = default_quant(variants)
    bases = [file for file in files if not is_adapter(file.path)]
    models = [model for model in gguf_models(bases) if gguf_quant(model[0].name) == selected]
    if len(models) > 1:
        first = ", ".join(model[0].name for model in models[:3])
        raise ModelRefused(f"{name} has {len(models)} GGUF models", f"name one of the files: {first}")
    return [file.path for file in (models[0] if models else files)]


def _names(path: Path) -> tuple[str, ...]:
    """The names of the files in a model folder, without subfolders."""
    if not path.is_dir():
        return ()
    return tuple(sorted(file.name for file in path.iterdir() if file.is_file()))


def _inspection(
    origin: Origin,
    kind: Literal["model", "adapter", "gguf"],
    shares: tuple[DtypeShare, ...],
    problems: Sequence[str],
    files: ModelFiles | None = None,
    **facts: Any,
) -> Inspection:
    """`shares`: the tensors by dtype. `files`: those of a model that localllm reads. `facts`: the other fields."""
    read = {} if files is None else {"rope_scaling": _rope_scaling(files), "warnings": files.warnings}
    return Inspection(
        name=origin.name,
        kind=kind,
        source=origin.source,
        local=origin.local,
        bytes=sum(share.bytes for share in shares),
        dtypes=shares,
        pickles=tuple(name for name in origin.files if Path(name).suffix.lower() in PICKLE_SUFFIXES),
        problems=tuple(problems),
        embeddings=embeddings_of(files),
        **{"licence": origin.licence, **read, **facts},
    )


def _inspect_model(ref: ModelRef, origin: Origin) -> Inspection:
    config: Mapping[str, Any] = {}
    tensors: Mapping[str, StoredTensor] = {}
    files = None
    problems = []
    hint = ""
    try:
        config = read_json(ref.file)
        if origin.problem:
            raise ModelRefused(origin.problem)
        tensors = read_tensors(ref.path)
        files = read_model(ref.path, ref.id)
        problems = _problems_of(files, origin.local)
    except ModelRefused as error:
        problems = [str(error)]
        hint = error.hint
    choice = "" if problems else _choice(files)
    architecture = _text(config.get("model_type"))
    return _inspection(
        origin,
        "model",
        _shares(tensors.values()),
        problems,
        files,
        architecture=architecture,
        parameters=None if files is None else num_parameters(tensors, config),
        quantization=_quantization(config, files),
        context=_number(config.get("max_position_embeddings")) if files is None else files.config.max_positions,
        template=try_folder(ref.path),
        code=_code(origin.files, config),
        backends=backend_verdicts(files, "".join(problems[:1])),
        choice=choice,
        hint="" if choice else hint or gguf_hint(origin.name, architecture),
    )


def _problems_of(files: ModelFiles, is_local: bool) -> list[str]:
    """The problems of a tokenizer, which is a hole in the skeleton of a remote model, and of missing tensors."""
    if not (files.path / TOKENIZER).exists():
        problem = f"{TOKENIZER} is missing"
    else:
        problem = tokenizer.problem(files.path) if is_local else ""
    return list(filter(None, [problem, missing_tensor(files)]))


def _inspect_weights(path: Path, origin: Origin) -> Inspection:
    """`path`: a safetensors file, or a folder with such files only. Raises ModelRefused for other files."""
    if (path / PARAMS).exists():
        raise ModelRefused(f"{origin.name} {OTHER_FORMAT}", f"use a model with config.json and {SINGLE}")
    paths = [path] if path.suffix.lower() == SAFETENSORS else sorted(path.glob(f"*{SAFETENSORS}"))
    if not paths:
        reason = origin.problem or f"{origin.name} is not a model: it has no config.json"
        hint = "a model is a folder with config.json and weights, as on Hugging Face, or a GGUF file"
        raise ModelRefused(reason, hint)
    problem = f"{origin.name}: {NO_CONFIG}"
    tensors: dict[str, StoredTensor] = {}
    try:
        for path in paths:
            tensors.update(read_header(path))
    except ModelRefused as error:
        problem = str(error)
    verdicts = backend_verdicts(None, NO_CONFIG)
    parameters = num_parameters(tensors, {}) or None
    return _inspection(origin, "model", _shares(tensors.values()), [problem], parameters=parameters, backends=verdicts)


def _inspect_adapter(ref: ModelRef, origin: Origin) -> Inspection:
    code = _code(origin.files, {})
    if problems := check(ref):
        return _inspection(origin, "adapter", (), problems, code=code)
    files = read_adapter_header(ref.path)
    factors = files.factors.values()
    return _inspection(
        origin,
        "adapter",
        _shares(tensor for pair in factors for tensor in (pair.a, pair.b)),
        (),
        architecture=files.base_class,
        parameters=sum(pair.rank * (pair.in_features + pair.out_features) for pair in factors) or None,
        base=files.base,
        rank=files.rank,
        code=code,
    )


def _inspect_gguf(paths: list[Path], origin: Origin) -> Inspection:
    """`paths`: one GGUF file, or the shards of one model."""
    quant = gguf_quant(paths[0].name)
    if problems := check_gguf(paths):
        verdicts = backend_verdicts(None, problems[0])
        return _inspection(
            origin, "gguf", (), problems, quantization=quant, backends=verdicts, variants=origin.variants
        )
    headers = [read_gguf_file(path) for path in paths]
    tensors = [tensor for header in headers for tensor in header.tensors]
    metadata = headers[0].metadata
    architecture = _text(metadata.get("general.architecture"))
    shares = _shares(tensors)
    files, choice, problems = _choice_of_gguf(paths[0], origin.name)
    return _inspection(
        origin,
        "gguf",
        shares,
        problems,
        files,
        architecture=architecture,
        parameters=sum(tensor.num_values for tensor in tensors) or None,
        quantization=quant or "".join(share.dtype for share in shares[:1]),
        context=_number(metadata.get(f"{architecture}.context_length")),
        licence=_text(metadata.get("general.license")) or origin.licence,
        template=try_gguf(paths[0]),
        backends=backend_verdicts(files, "" if files else problems[0]),
        choice=choice,
        variants=origin.variants,
    )


def embeddings_of(files: ModelFiles | None) -> str:
    """The vectors that an embedding model computes, or the reason why it computes none; empty for other models."""
    pooling = None if files is None else read_pooling(files)
    return "" if pooling is None else pooling.title


def gguf_facts(paths: Sequence[Path]) -> tuple[str, tuple[DtypeShare, ...]]:
    """The licence in the metadata of a GGUF model, and its weights of each type. `paths`: its sound files."""
    headers = [read_gguf_file(path) for path in paths]
    tensors = (tensor for header in headers for tensor in header.tensors)
    return _text(headers[0].metadata.get("general.license")), _shares(tensors)


def _shares(tensors: Iterable[StoredTensor | GgufTensor]) -> tuple[DtypeShare, ...]:
    return dtype_shares((tensor.dtype, tensor.num_bytes) for tensor in tensors)


def backend_verdicts(files: ModelFiles | None, problem: str) -> tuple[BackendVerdict, ...]:
    """The verdict of each backend on this machine. `problem`: the reason if `files` is None."""
    verdicts = []
    for name in backends.ORDER:
        backend = backends.load(name)
        device = backend.probe()
        if isinstance(device, Unavailable):
            verdicts.append(BackendVerdict(name, False, device.reason, available=False))
            continue
        refusal = problem or (backend.accepts(files) if files is not None else "")
        code = "" if files is None else backends.code_of(backend, files)
        says = ", ".join(filter(None, (device.name, code)))
        verdicts.append(BackendVerdict(name, not refusal, refusal or says))
    return tuple(verdicts)


def _choice(files: ModelFiles | None) -> str:
    try:
        return backends.choose(backends.AUTO, files).info.backend
    except (backends.BackendUnavailable, ModelRefused):
        return ""


def _choice_of_gguf(path: Path, name: str) -> tuple[ModelFiles | None, str, list[str]]:
    """A GGUF model, the backend that runs it, and the problems of its files or of the installation."""
    try:
        files = read_model(path, name)
    except ModelRefused as error:
        return None, "", [str(error)]
    try:
        return files, backends.choose(backends.AUTO, files).info.backend, []
    except backends.BackendUnavailable as error:
        return files, "", [str(error)]
    except ModelRefused:
        return files, "", []


def _quantization(config: Mapping[str, Any], files: ModelFiles | None) -> str:
    """The format of quantised weights; empty if they are not quantised."""
    if files is not None and files.config.quantization is not None:
        parsed = files.config.quantization
        if parsed.method != "foreign":
            return parsed.title
    group_format = config.get("quantization")
    if isinstance(group_format, dict) and "bits" in group_format:
        return f"mlx {group_format['bits']!s:.20}-bit"
    table = config.get("quantization_config")
    return _text(table.get("quant_method")) or "unknown" if isinstance(table, dict) else ""


def _rope_scaling(files: ModelFiles) -> str:
    """The method, and the positions of the original training; empty without scaling."""
    for rope in files.config.ropes.values():
        if rope.kind != "default":
            return f"{rope.kind}, factor {rope.factor:g}, trained with {rope.original_positions} tokens"
    return ""


def _code(names: Iterable[str], config: Mapping[str, Any]) -> tuple[str, ...]:
    """The code of a repository: Python files, and references to them in config.json."""
    files = tuple(name for name in names if name.endswith(CODE_SUFFIX))
    references = tuple(f"{key} in config.json" for key in ("auto_map", "model_file") if config.get(key))
    return files + references


def _text(value: object) -> str:
    return value[:100] if isinstance(value, str) else ""


def _number(value: object) -> int:
    return value if type(value) is int else 0
