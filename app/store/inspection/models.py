"""Inspects models, adapters and GGUF files by their configuration and headers. Reads no weights, runs no code of them.

A folder with the small files of a repository, and with sparse files for its weights, is inspected like a model: see
skeleton.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .... import backends
from ....engine.errors import ModelRefused
from ....engine.files.adapter_files import AdapterFiles, read_adapter_header
from ....engine.files.gguf import GgufHeader
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
    whole = [file for file in files if not is_adapter(file.path)]
    models = [model for model in gguf_models(whole) if gguf_quant(model[0].name) == selected]
    if len(models) > 1:
        first = ", ".join(model[0].name for model in models[:3])
        raise ModelRefused(f"{name} has {len(models)} GGUF models", f"name one of the files: {first}")
    return [file.path for file in (models[0] if models else files)]


def _names(path: Path) -> tuple[str, ...]:
    """The names of the files in a model folder, without subfolders."""
    if not path.is_dir():
        return ()
    return tuple(sorted(file.name for file in path.iterdir() if file.is_file()))


def _inspect_model(ref: ModelRef, origin: Origin) -> Inspection:
    folder = ref.path
    config: Mapping[str, Any] = {}
    tensors: Mapping[str, StoredTensor] = {}
    files = None
    problems = []
    hint = ""
    try:
        config = read_json(folder / "config.json")
        if origin.problem:
            raise ModelRefused(origin.problem)
        tensors = read_tensors(folder)
        files = read_model(folder, origin.name)
        if not (folder / TOKENIZER).exists():
            problems.append(f"{TOKENIZER} is missing")
        elif origin.local and (problem := tokenizer.problem(folder)):  # elsewhere the file is a hole
            problems.append(problem)
        if missing := missing_tensor(files):
            problems.append(missing)
    except ModelRefused as error:
        problems.append(str(error))
        hint = error.hint
    verdicts = backend_verdicts(files, problems[0] if problems else "")
    choice = _choice(files) if not problems else ""
    architecture = _text(config.get("model_type"))
    return Inspection(
        name=origin.name,
        kind="model",
        source=origin.source,
        local=origin.local,
        architecture=architecture,
        parameters=num_parameters(tensors, config) if files is not None else None,
        bytes=sum(tensor.num_bytes for tensor in tensors.values()),
        dtypes=dtype_shares((tensor.dtype, tensor.num_bytes) for tensor in tensors.values()),
        quantization=_quantization(config, files),
        context=_context(config, files),
        rope_scaling=_rope_scaling(files),
        embeddings=embeddings_of(files),
        licence=origin.licence,
        template=try_folder(folder),
        pickles=_pickles(origin.files),
        code=_code(origin.files, config),
        problems=tuple(problems),
        warnings=() if files is None else files.warnings,
        backends=verdicts,
        choice=choice,
        hint="" if choice else hint or gguf_hint(origin.name, architecture),
    )


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
    return Inspection(
        name=origin.name,
        kind="model",
        source=origin.source,
        local=origin.local,
        architecture="",
        parameters=num_parameters(tensors, {}) or None,
        bytes=sum(tensor.num_bytes for tensor in tensors.values()),
        dtypes=dtype_shares((tensor.dtype, tensor.num_bytes) for tensor in tensors.values()),
        quantization="",
        context=0,
        licence=origin.licence,
        problems=(problem,),
        backends=backend_verdicts(None, NO_CONFIG),
    )


def _inspect_adapter(ref: ModelRef, origin: Origin) -> Inspection:
    files: AdapterFiles | None = None
    problems = check(ref)
    if not problems:
        files = read_adapter_header(ref.path)
    factors = [] if files is None else list(files.factors.values())
    tensors = [tensor for pair in factors for tensor in (pair.a, pair.b)]
    return Inspection(
        name=origin.name,
        kind="adapter",
        source=origin.source,
        local=origin.local,
        architecture=files.base_class if files is not None else "",
        parameters=sum(pair.rank * (pair.in_features + pair.out_features) for pair in factors) or None,
        bytes=sum(tensor.num_bytes for tensor in tensors),
        dtypes=dtype_shares((tensor.dtype, tensor.num_bytes) for tensor in tensors),
        quantization="",
        context=0,
        licence=origin.licence,
        base=files.base if files is not None else "",
        rank=files.rank if files is not None else 0,
        pickles=_pickles(origin.files),
        code=_code(origin.files, {}),
        problems=tuple(problems),
    )


def _inspect_gguf(paths: list[Path], origin: Origin) -> Inspection:
    """`paths`: one GGUF file, or the shards of one model."""
    headers: list[GgufHeader] = []
    files = None
    problems = check_gguf(paths)
    if not problems:
        headers = [read_gguf_file(path) for path in paths]
    if headers:
        try:
            files = read_model(paths[0], origin.name)
        except ModelRefused as error:
            problems.append(str(error))
    choice, missing = _choice_of_gguf(files) if files is not None else ("", [])
    problems += missing
    metadata = headers[0].metadata if headers else {}
    tensors = [tensor for header in headers for tensor in header.tensors]
    architecture = _text(metadata.get("general.architecture"))
    shares = _shares(headers)
    context = metadata.get(f"{architecture}.context_length", 0)
    return Inspection(
        name=origin.name,
        kind="gguf",
        source=origin.source,
        local=origin.local,
        architecture=architecture,
        parameters=sum(tensor.num_values for tensor in tensors) or None,
        bytes=sum(share.bytes for share in shares),
        dtypes=shares,
        quantization=gguf_quant(paths[0].name) or (shares[0].dtype if shares else ""),
        context=context if type(context) is int else 0,
        rope_scaling=_rope_scaling(files),
        embeddings=embeddings_of(files),
        licence=_text(metadata.get("general.license")) or origin.licence,
        template=try_gguf(paths[0]) if headers else None,
        pickles=_pickles(origin.files),
        problems=tuple(problems),
        warnings=() if files is None else files.warnings,
        backends=backend_verdicts(files, problems[0] if files is None else ""),
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
    return _text(headers[0].metadata.get("general.license")), _shares(headers)


def _shares(headers: Sequence[GgufHeader]) -> tuple[DtypeShare, ...]:
    return dtype_shares((tensor.dtype, tensor.num_bytes) for header in headers for tensor in header.tensors)


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
        verdicts.append(BackendVerdict(name, not refusal, refusal or device.name))
    return tuple(verdicts)


def _choice(files: ModelFiles | None) -> str:
    try:
        return backends.choose(backends.AUTO, files).info.backend
    except (backends.BackendUnavailable, ModelRefused):
        return ""


def _choice_of_gguf(files: ModelFiles) -> tuple[str, list[str]]:
    """The backend that runs a GGUF model, and the problem if it is not installed."""
    try:
        return backends.choose(backends.AUTO, files).info.backend, []
    except backends.BackendUnavailable as error:
        return "", [str(error)]
    except ModelRefused:
        return "", []


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


def _context(config: Mapping[str, Any], files: ModelFiles | None) -> int:
    if files is not None:
        return files.config.max_positions
    context = config.get("max_position_embeddings")
    return context if type(context) is int else 0


def _rope_scaling(files: ModelFiles | None) -> str:
    """The method, and the positions of the original training; empty without scaling."""
    ropes = files.config.ropes.values() if files is not None else ()
    for rope in ropes:
        if rope.kind != "default":
            return f"{rope.kind}, factor {rope.factor:g}, trained with {rope.original_positions} tokens"
    return ""


def _pickles(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in names if Path(name).suffix.lower() in PICKLE_SUFFIXES)


def _code(names: Iterable[str], config: Mapping[str, Any]) -> tuple[str, ...]:
    """The code of a repository: Python files, and references to them in config.json."""
    files = tuple(name for name in names if name.endswith(CODE_SUFFIX))
    references = tuple(f"{key} in config.json" for key in ("auto_map", "model_file") if config.get(key))
    return files + references


def _text(value: object) -> str:
    return value[:100] if isinstance(value, str) else ""
