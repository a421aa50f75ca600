"""Models that transformers' own code computes, with our weights, over our cache.

For decoders without a page in models/. transformers builds the model from its class, without values. `describe` probes
its code, `check` compares a tiny model of the class with transformers, and `model` puts our weights in. No code of a
model's folder runs. This module imports neither transformers nor torch; only a load of such a model does.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from .verdicts import REFUSED, RIGHT

EXTRA = "localllm[transformers]"


def refusal(model_type: str) -> str:
    """The reason why transformers' code cannot compute this architecture; empty if it may. A load checks the code."""
    if model_type in REFUSED:
        return f"transformers' code of {model_type} is not supported: {REFUSED[model_type]}"
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return f"localllm has no page for {model_type:.50}, and transformers is not installed (pip install '{EXTRA}')"
    if model_type in RIGHT or _is_causal(Path(spec.origin).parent / "models", model_type):
        return ""
    return f"neither localllm nor the installed transformers has the causal decoder {model_type:.50}"


def _is_causal(models: Path, model_type: str) -> bool:
    """Whether a later transformers, with its code in the folder `models`, has the decoder. Imports nothing."""
    name = model_type.removesuffix("_text").replace("-", "_")
    code = models / name / f"modeling_{name}.py"
    return name.isidentifier() and code.is_file() and "ForCausalLM(" in code.read_text("utf-8")
