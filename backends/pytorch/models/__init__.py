"""One file per architecture, named after config.json's model_type, with build(weights, config, context).

`architectures` and `accepts` import none of these files, and no torch.
"""

from __future__ import annotations

from pkgutil import iter_modules

from ....engine.modelfiles import ModelFiles


def architectures() -> list[str]:
    """The supported values of model_type."""
    return sorted(module.name for module in iter_modules(__path__))


def accepts(files: ModelFiles) -> str:
    """The reason why the torch backends cannot load these files; empty if they can."""
    known = architectures()
    quantised = files.config.quantization
    if files.config.model_type not in known:
        return f"the architecture {files.config.model_type:.50} is not among {', '.join(known)}"
    return "its weights are in MLX's format" if quantised and quantised.method == "foreign" else ""
