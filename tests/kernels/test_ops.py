"""Every op of every torch device present, and of every ISA variant of this machine, for every case, against the
reference in float64.

New memory for outputs is full of NaN, so an output that is not written fails.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from localllm.backends.cpu import device as cpu
from localllm.backends.platforms import platforms
from localllm.kernels.ops import Ops
from localllm.kernels.ops.attention import Attend
from localllm.kernels.ops.cases import CASES, reference_check
from localllm.kernels.ops.cases.case import Case
from localllm.kernels.ops.cases.reference_check import call_op, copy_to
from localllm.kernels.triton.problem import triton_problem

from ..accelerator import TRITON, Accelerator, accelerator, triton_device


@dataclasses.dataclass(frozen=True)
class Target:
    """Ops and the device that runs them."""

    label: str
    ops: Ops
    device: str = "cpu"
    variant: str = ""  # the ISA variant of the CPU's kernels, which then have `workers`
    workers: int = 1
    backend: str = ""  # of an accelerator: recording.py counts its tests for this backend
    lane: str = ""  # the implementation of an accelerator's ops, as in recording.py


def on_accelerator(present: Accelerator | None, platforms: Mapping[str, Ops]) -> list[Target]:
    """The ops of the accelerator's backend, and the Triton kernels alone; none without an accelerator."""
    if present is None or present.backend not in platforms:
        return []
    lanes = {"": platforms[present.backend]}
    if present.device in TRITON and not triton_problem():
        from localllm.kernels.triton.ops import with_triton

        lanes["triton"] = with_triton(Ops())
    if lanes[""] == lanes.get("triton"):
        del lanes[""]
    names = {lane: "-".join(filter(None, (present.backend, lane))) for lane in lanes}
    return [Target(names[lane], ops, present.device, backend=present.backend, lane=lane) for lane, ops in lanes.items()]


VARIANTS = [] if cpu.MISSING else torch.ops.localllm.variants().split()
ON_ACCELERATOR = on_accelerator(accelerator(), platforms())
TARGETS = [
    Target("reference", Ops()),
    *(Target(f"cpu-{variant}", cpu.OPS, variant=variant) for variant in VARIANTS),
    *(Target(f"cpu-{variant}-3-workers", cpu.OPS, variant=variant, workers=3) for variant in VARIANTS[-1:]),
    *ON_ACCELERATOR,
]


@pytest.fixture
def poison() -> Iterator[None]:
    """torch.empty returns NaN and the largest integers."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=TARGETS, ids=[target.label for target in TARGETS], scope="module")
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    if not request.param.variant:
        yield request.param
        return
    before = torch.ops.localllm.threads()
    torch.ops.localllm.use_variant(request.param.variant)
    torch.ops.localllm.use_threads(request.param.workers)
    few = torch.ops.localllm.share_from(0)  # share all work, even if one thread would normally do it alone
    yield request.param
    torch.ops.localllm.share_from(few)
    torch.ops.localllm.use_threads(before)
    torch.ops.localllm.use_variant("")


@cache
def asked(number: int, dtype: torch.dtype) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The case's arguments, and the outputs of the reference in float64."""
    return reference_check.reference_run(CASES[number], dict(Ops())[CASES[number].op], dtype)


@pytest.mark.real
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_op_equals_reference(target: Target, number: int) -> None:
    case = CASES[number]
    for dtype, tolerance in case.tolerances.items():
        arguments, expected = asked(number, dtype)
        given = reference_check.device_arguments(case, target.ops, arguments, target.device, dtype)
        found = call_op(case, dict(target.ops)[case.op], given)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            if not one.is_floating_point():
                assert torch.equal(one.cpu(), other), dtype
                continue
            scale = other[other.isfinite()].abs().max().item() if other.isfinite().any() else 1.0
            allowed = tolerance * max(scale, 1e-6)
            torch.testing.assert_close(one.cpu().double(), other.double(), rtol=0.0, atol=allowed, msg=_told(dtype))


@pytest.mark.parametrize(
    "target", [Target("reference", Ops()), Target("cpu", cpu.OPS), *ON_ACCELERATOR], ids=lambda target: target.label
)
@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_outputs_have_the_requested_dtype(target: Target, number: int) -> None:
    """Without a requested dtype the output has the dtype of the input."""
    case = CASES[number]
    for dtype in case.tolerances:
        arguments, _ = asked(number, dtype)
        given = reference_check.device_arguments(case, target.ops, arguments, target.device, dtype)
        (first, *_) = (
            given[name]
            for name in ("x", "gate_up", "query", "qkv", "logits", "weight", "heads", "pages", "tokens", "key")
            if name in given
        )
        wanted = given.get("dtype") or first.dtype
        integers = torch.int32 if case.op == "moe.route" else torch.int64
        returned = dict(target.ops)[case.op](**given)
        for one in [returned] if isinstance(returned, torch.Tensor) else returned or ():
            assert one.dtype == (wanted if one.is_floating_point() else integers)


def broken(ops: Ops) -> Ops:
    """The ops with a norm that is off by 1 %."""
    norm = dataclasses.replace(ops.norm, rms=lambda *arguments, **named: ops.norm.rms(*arguments, **named) * 1.01)
    return dataclasses.replace(ops, norm=norm)


def test_the_ops_of_an_accelerator_are_tested() -> None:
    """A stand-in for an accelerator: torch's CPU under the name of another backend."""
    number = next(number for number, case in enumerate(CASES) if case.op == "norm.rms")
    present = Accelerator("xpu", "cpu")
    (right,) = on_accelerator(present, {"xpu": Ops()})
    assert (right.label, right.device, right.backend) == ("xpu", "cpu", "xpu")
    test_op_equals_reference(right, number)
    (wrong,) = on_accelerator(present, {"xpu": broken(Ops())})
    with pytest.raises(AssertionError, match="float"):
        test_op_equals_reference(wrong, number)
    assert on_accelerator(None, {"xpu": Ops()}) == on_accelerator(present, {"cuda": Ops()}) == []


def test_an_accelerator_has_its_ops_and_the_triton_kernels() -> None:
    pytest.importorskip("triton")
    from localllm.kernels.triton.ops import with_triton

    triton = with_triton(Ops())
    targets = on_accelerator(Accelerator("hip", "cuda"), {"hip": broken(triton)})
    assert [(target.label, target.backend, target.lane) for target in targets] == [
        ("hip", "hip", ""),
        ("hip-triton", "hip", "triton"),
    ]
    (alone,) = on_accelerator(Accelerator("hip", "cuda"), {"hip": triton})
    assert (alone.label, alone.lane) == ("hip-triton", "triton")


@pytest.mark.parametrize(
    ("device", "hip", "expected"),
    [
        ("cuda", None, Accelerator("cuda", "cuda")),
        ("cuda", "7.1.25424", Accelerator("hip", "cuda")),
        ("xpu", None, Accelerator("xpu", "xpu")),
        ("npu", None, Accelerator("npu", "npu")),
        ("mps", None, None),
        (None, None, None),
    ],
)
def test_an_accelerator_has_the_name_of_its_backend(
    device: str | None, hip: str | None, expected: Accelerator | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = device and SimpleNamespace(type=device)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: fake)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert accelerator() == expected
    assert triton_device() == (device if device in ("cuda", "xpu") else "")


def _told(dtype: torch.dtype) -> Callable[[str], str]:
    return lambda text: f"{dtype}: {text}"


class Namespaces(TorchDispatchMode):
    """The namespaces of the torch ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.namespace)
        return func(*args, **(kwargs or {}))


@pytest.mark.real
@pytest.mark.skipif(bool(cpu.MISSING), reason=cpu.MISSING or "")
@pytest.mark.parametrize("name", sorted({case.op for case in CASES}))
def test_cpu_kernels_compute_every_case_without_float8(name: str) -> None:
    """A wrapper that always calls the reference would be right, but slow. The CPU has no latent caches in two parts."""
    if dict(cpu.OPS)[name] is dict(Ops())[name]:
        pytest.skip("the CPU has no kernel for it")
    left = []
    for number, case in enumerate(CASES):
        if case.op != name:
            continue
        arguments, _ = asked(number, next(iter(case.tolerances)))
        given = reference_check.device_arguments(case, cpu.OPS, arguments, "cpu", next(iter(case.tolerances)))
        with Namespaces() as called:
            call_op(case, dict(cpu.OPS)[name], given)
        if "localllm" not in called.seen:
            left.append(case.label)
    assert all(label.startswith(("float8", "apart")) for label in left), left


def naive_attention(
    query: torch.Tensor,
    rows: Any,
    attend: Attend,
) -> torch.Tensor:
    """Attention for one query of one head at a time."""
    key_pages, value_pages, scale, window, soft_cap, sinks, _ = attend
    out, token = torch.empty_like(query), 0
    share = query.shape[1] // key_pages.shape[2]
    size = key_pages.shape[1]
    for row, (queries, context) in enumerate(zip(rows.query_lens, rows.contexts, strict=True)):
        for own in range(context - queries, context):
            first = max(0, own - window + 1) if window else 0
            at = [(int(rows.page_table[row, p // size]), p % size) for p in range(first, own + 1)]
            for head in range(query.shape[1]):
                keys = torch.stack([key_pages[page, offset, head // share] for page, offset in at])
                values = torch.stack([value_pages[page, offset, head // share] for page, offset in at])
                scores = keys @ query[token, head] * scale
                if soft_cap:
                    scores = torch.tanh(scores / soft_cap) * soft_cap
                sink = scores[:0] if sinks is None else sinks[head : head + 1]
                out[token, head] = torch.cat([scores, sink]).softmax(0)[: len(at)] @ values
            token += 1
    return out


@pytest.mark.parametrize("case", [case for case in CASES if case.op == "attention.paged"], ids=str)
def test_attention_reference_equals_a_plain_loop(case: Case) -> None:
    arguments = dict(case.make(torch.Generator().manual_seed(1), torch.float32))
    arguments = {name: copy_to(value, "cpu", wide=True) for name, value in arguments.items()}
    torch.testing.assert_close(Ops().attention.paged(**arguments), naive_attention(**arguments), rtol=0.0, atol=1e-12)


def test_every_op_has_a_case_and_every_case_an_op() -> None:
    assert {case.op for case in CASES} == {name for name, _ in Ops()} - {
        "linear.pack_slices",
        "moe.pack_slices",
        "layer.prepare",
        "layer.prepare_stack",
    }, "products show how they pack"
    assert len({str(case) for case in CASES}) == len(CASES)


class Unsaturated(TorchDispatchMode):
    """Conversions to float8 that return NaN beyond its range, as in some torch versions and devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and made.dtype == torch.float8_e4m3fn:
            made.view(torch.uint8)[args[0].abs() >= 465.0] = 0x7F
        return made


def test_a_float8_cache_saturates() -> None:
    key = torch.tensor([-1e4, -449.0, -448.0, 447.0, 470.0, torch.inf, 0.0, 1.0]).view(1, 1, 8)
    pages = torch.zeros(2, 1, 1, 1, 8).to(torch.float8_e4m3fn)
    with Unsaturated():
        assert key.to(torch.float8_e4m3fn).isnan().sum() == 3
        Ops().kv.store(key, -key, *pages, torch.tensor([0]))
    expected = torch.tensor([-448.0, -448, -448, 448, 448, 448, 0, 1])
    assert torch.equal(pages[0].flatten().float(), expected)
    assert torch.equal(pages[1].flatten().float(), -expected)


def every_op_fast() -> Ops:
    """Ops without any reference."""
    families = {}
    for family in dataclasses.fields(Ops()):
        held = getattr(Ops(), family.name)
        ops = {op.name: object() for op in dataclasses.fields(held)}
        families[family.name] = dataclasses.replace(held, **ops)
    return Ops(**families)


@pytest.mark.parametrize("name", [name for name, _ in Ops()])
def test_a_fused_op_is_replaced_with_each_op_it_contains(name: str) -> None:
    """If it stayed, the fused op would still compute with the old op."""
    fast, family = every_op_fast(), name.partition(".")[0]
    changed = {one for one, op in fast.with_ops_of(Ops(), [name]) if op is dict(Ops())[one]}
    layer = {one for one, _ in Ops() if one.startswith("layer.")}
    expected = {name}
    if family in ("norm", "rope") or name == "kv.store":
        expected.add("kv.append")
    if family == "rope":
        expected.add("kv.append_latent")
    if family == "linear" and name != "linear.embedding":
        expected.add("linear.pack_slices")
    if family in ("linear", "activation", "moe") and name not in ("linear.embedding", "moe.route"):
        expected |= {"moe.experts", "moe.pack_slices"}
    if family not in ("sampling", "state") and name not in ("linear.embedding", "kv.copy_pages"):
        expected |= layer
    assert changed == expected
    assert {one for one, op in fast.with_ops_of(Ops(), [family]) if op is dict(Ops())[one]} >= expected
