"""Whether a model fits in the memory of this machine, before it is loaded or downloaded, and its estimated speed.

The numbers are those of the memory plan that a backend computes when it loads the model.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from .... import backends
from ....backends.shared_settings import accepted_backend, without_refused
from ....engine.errors import ModelRefused, ModelTooLarge, SettingRefused
from ....engine.files.model_files import ModelFiles
from ....engine.memory_plan import MemoryPlan
from ....engine.options import LoadOptions
from ....engine.runner import Backend, DeviceInfo, Unavailable
from ..records import Fit


def fit(
    files: ModelFiles,
    options: LoadOptions,
    backend: str,
    context: int,
    parallel: int,
    shared: Collection[str] = (),
) -> list[Fit]:
    """The fit on each available backend, or on the requested backend only. Backends that run the model are first.

    If none of these runs the model, the unavailable backends that read it follow, with the reason of each.

    `options`: those of a load; their context is ignored. `context`: 0 means the largest context that fits.
    `shared`: the settings of all models, as in backends.shared_settings. Raises BackendUnavailable if no backend is
    available.
    """
    options = replace(options, context=None, packed_dir=None, self_test_dir=None)
    backend = accepted_backend(backend, files, shared)
    names = backends.ORDER if backend == backends.AUTO else (backend,)
    results = []
    reasons = {}
    for name in names:
        module = backends.load(name)
        device = module.probe()
        if isinstance(device, Unavailable):
            reasons[name] = device.reason
        else:
            results.append(_fit_on(module, device, files, options, context, parallel, shared))
    if not results:
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        message = f"no backend works on this machine ({listed})"
        raise backends.BackendUnavailable(message, reasons, "run `localllm doctor` for details")
    accepting = [name for name in names if _accepts(backends.load(name), files)]
    if reasons.keys() >= set(accepting):
        results += [_no_fit(name, "unavailable", reasons[name]) for name in accepting]
    return sorted(results, key=lambda result: not result.runs)


def _no_fit(backend: str, device: str, reason: str) -> Fit:
    """The result of a backend that cannot run the model."""
    return Fit(backend, device, fits=False, reason=reason, context=0, parallel=0, largest_context=0, runs=False)


def _accepts(backend: Backend, files: ModelFiles) -> bool:
    accepts = getattr(backend, "accepts", None)  # a backend without a runner has only `probe`
    return accepts is not None and not accepts(files)


def _fit_on(
    backend: Backend,
    device: DeviceInfo,
    files: ModelFiles,
    options: LoadOptions,
    context: int,
    parallel: int,
    shared: Collection[str],
) -> Fit:
    try:
        refusal = backend.accepts(files)
        if refusal:
            raise ModelRefused(refusal)
        planned = without_refused(lambda options: backend.plan_memory(files, options), files.name, options, shared)
    except (ModelRefused, SettingRefused) as error:
        if isinstance(error, ModelTooLarge):
            return Fit(backend.name, device.name, False, str(error), context, parallel, 0)
        return _no_fit(backend.name, device.name, str(error))
    plan = planned.result
    if "context" in shared:
        context = min(context, plan.max_positions)
    largest = plan.largest_context(parallel)
    context = context or largest or plan.max_positions
    fits = plan.fits(context, parallel)
    return Fit(
        backend=backend.name,
        device=device.name,
        fits=fits,
        reason="" if fits else _reason(plan, context, parallel),
        context=context,
        parallel=parallel,
        largest_context=largest,
        free=plan.free,
        weights=plan.weights,
        adapters=plan.adapters,
        cache=plan.cache_bytes(context, parallel),
        window_savings=plan.window_savings(context, parallel),
        max_cache=plan.max_cache,
        remaining=plan.remaining,
        tokens_per_second=_speed(backend, plan) if fits else None,
        notes=planned.warnings,
    )


def _reason(plan: MemoryPlan, context: int, parallel: int) -> str:
    if not plan.weights_fit:
        return "its weights do not fit in the free memory"
    if context > plan.max_positions:
        return f"the model has a context of {plan.max_positions} tokens, not {context}"
    sequences = f"{parallel} sequences of {context} tokens" if parallel > 1 else f"a context of {context} tokens"
    return f"the KV cache for {sequences} does not fit"


def _speed(backend: Backend, plan: MemoryPlan) -> float | None:
    """Tokens per second if the reads of the weights bound the speed."""
    if not plan.token_bytes:
        return None
    bandwidth = backend.read_bandwidth()
    return None if bandwidth is None else bandwidth / plan.token_bytes
