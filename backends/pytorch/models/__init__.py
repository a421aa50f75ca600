"""The model architectures. Each has a module here. The module is named after the model_type in config.json and has the
function build(weights, config, context).

`architectures` and `accepts` import neither these files nor torch.
"""

from __future__ import annotations

from pkgutil import iter_modules

from ....engine.files.model_files import ModelFiles
from ..transformers_code import refusal


def architectures() -> list[str]:
    """The supported values of model_type."""
    return sorted(module.name for module in iter_modules(__path__))


def is_native(model_type: str) -> bool:
    """Whether a file here computes the architecture; if not, the code of transformers may."""
    return model_type in architectures()


def code(files: ModelFiles) -> str:
    """The code of another library that computes the model; empty if it is ours."""
    return "" if files.gguf or is_native(files.config.model_type) else "transformers' code"


def accepts(files: ModelFiles) -> str:
    """The reason why the torch backends cannot load these files; empty if they can."""
    if files.gguf:
        return "it reads no GGUF files"
    if not is_native(files.config.model_type):
        return refusal(files.config.model_type)
    quantization = files.config.quantization
    if quantization is not None and quantization.method == "foreign":
        return "its weights are in MLX's format"
    return ""
