"""One file per architecture, named as config.json's model_type; each has build(weights, config, context).

Looking at which there are imports none of them, and no torch.
"""

from __future__ import annotations

from pkgutil import iter_modules

from ....engine.modelfiles import ModelFiles


def architectures() -> list[str]:
    """The model types that have a file here."""
    return sorted(module.name for module in iter_modules(__path__))


def accepts(files: ModelFiles) -> str:
    """Why the torch family cannot load these files; empty when it can."""
    known = architectures()
    quantised = files.config.quantization
    if files.config.model_type not in known:
        return f"the architecture {files.config.model_type:.50} is not among {', '.join(known)}"
    return "its weights are in MLX's format" if quantised and quantised.method == "foreign" else ""
