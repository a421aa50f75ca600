"""The kernels of the fake NPU: each aten op computes with torch's CPU kernel, each op of torch_npu with its reference.

A call checks its arguments, allocates its outputs with torch_npu's allocator, and queues its work on the current stream
of the fake ACL (fake_acl.c). The work reads and writes the memory through CPU tensors at the same addresses. Like on an
NPU, it holds no reference to its tensors: the allocator gives freed memory only to later work of the same stream.

Outputs have poison (NaN, or large integers) until their work runs.
"""

from __future__ import annotations

import ctypes
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch_npu
from torch import Tensor

from .environment import LIBRARIES
from .ops import OPS
from .ops.rules import Call, Op

ACL = ctypes.PyDLL(str(LIBRARIES / "libascendcl.so"))
ACL.fake_call.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.c_int]
ACL.fake_call.restype = None
ACL.fake_fail.argtypes = [ctypes.c_char_p]
ACL.fake_fail.restype = None
ACL.fake_state.argtypes = [ctypes.c_void_p]
ACL.fake_capture.argtypes = [ctypes.c_void_p]
ACL.fake_capture.restype = ctypes.c_void_p  # None: the stream is in no capture
IDLE, CAPTURING = 0, 2  # of fake_state

calls: Counter[str] = Counter()  # of the ops of torch_npu, by name
Compute = Callable[..., Any]


def order(*, early: bool) -> None:
    """Select when other streams run if the host waits for a stream: late (a stream waits for them), or before it."""
    ACL.fake_early(int(early))


def _stream() -> int:
    stream: int = torch_npu._C._npu_getCurrentRawStream(0)
    return stream


def alias(tensor: Tensor) -> Tensor:
    """The memory of an NPU tensor as a CPU tensor."""
    storage = torch._C._construct_storage_from_data_pointer(
        tensor.untyped_storage().data_ptr(), torch.device("cpu"), tensor.untyped_storage().nbytes()
    )
    cpu = torch.empty(0, dtype=tensor.dtype)
    return cpu.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _fill_poison(cpu: Tensor) -> None:
    if cpu.dtype.is_floating_point or cpu.dtype.is_complex:
        cpu.fill_(float("nan"))
    elif cpu.dtype != torch.bool:
        cpu.fill_(0x77 if cpu.element_size() == 1 else 0x7777)


_modes: list[torch.inference_mode] = []  # queued work runs in inference mode


def _start() -> None:
    _modes.append(torch.inference_mode())
    _modes[-1].__enter__()


def _end() -> None:
    _modes.pop().__exit__(None, None, None)


ACL.fake_hooks.argtypes = [ctypes.py_object, ctypes.py_object]
ACL.fake_hooks.restype = None
ACL.fake_hooks(_start, _end)


def queue(work: Callable[[], Any], *, first: bool = False) -> None:
    """Queue work on the current stream. `first`: a replay runs it before all other work of its capture."""

    def guarded() -> None:
        try:
            work()
        except Exception as error:
            ACL.fake_fail(f"{type(error).__name__}: {error}".encode())

    ACL.fake_call(_stream(), guarded, first)


def poison(tensor: Tensor, *, is_output: bool = False) -> Tensor:
    """`is_output`: queued work will write the tensor, so poison just before that work shows nothing."""
    if not tensor.numel():
        return tensor
    cpu = alias(tensor)
    stream = _stream()
    state = ACL.fake_state(stream)
    if state == IDLE:
        _fill_poison(cpu)
    elif state == CAPTURING and not _was_used(tensor, stream):
        queue(lambda: _fill_poison(cpu), first=True)
    elif not is_output:
        queue(lambda: _fill_poison(cpu))
    return tensor


# The memory that the arguments of a capture's work have, by capture. The allocator may give it to later outputs of the
# same capture, so it has no poison at the start of a replay.
_used: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)


def _use(tensor: Tensor, stream: int) -> None:
    capture = ACL.fake_capture(stream)
    if capture:
        start = tensor.untyped_storage().data_ptr()
        _used[capture].append((start, start + tensor.untyped_storage().nbytes()))


def _was_used(tensor: Tensor, stream: int) -> bool:
    start = tensor.untyped_storage().data_ptr()
    end = start + tensor.untyped_storage().nbytes()
    return any(first < end and start < last for first, last in _used[ACL.fake_capture(stream)])


def synchronize() -> None:
    torch_npu.npu.current_stream().synchronize()


def _map(value: Any, change: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return [_map(item, change) for item in value]
    return value


class _Host:
    """Arguments for the CPU: tensors as aliases, the device and the generator of the CPU."""

    def __init__(self, name: str, has_host_tensors: bool) -> None:
        self._name = name
        self._has_host_tensors = has_host_tensors

    def __call__(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if isinstance(value, torch.Generator) and value.device.type == "npu":
            return _generator(value, value.initial_seed())
        return _map(value, self._tensor)

    def _tensor(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "npu":
            _use(tensor, _stream())
            return alias(tensor)
        if tensor.dim() and not self._has_host_tensors:
            raise RuntimeError(f"{self._name}: expected all tensors on the same device, and one is on {tensor.device}")
        return tensor.clone()


HOST_INDICES = {"aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put"}


@cache
def _generator(generator: torch.Generator, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype, value.device.type)
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return (type(value), value)


def _meta(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, torch.Generator):
        return None
    return _map(
        value, lambda tensor: torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    )


class Kernel:
    """The kernel of one op."""

    def __init__(self, name: str, record: Op | None = None) -> None:
        """`record`: the reference and the rules of an op of torch_npu; None: the work is the op itself, on the CPU."""
        space, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        self.name = name
        self.op = getattr(getattr(getattr(torch.ops, space), base), overload or "default")
        self._record = record
        self._is_out = record is not None and overload == "out"
        self.has_meta = torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta")
        self._host = _Host(name, name in HOST_INDICES or bool(record and record.host))
        self._shapes: dict[Any, Any] = {}
        schema = self.op._schema
        self.written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        self._positions = {a.name: i for i, a in enumerate(schema.arguments)}
        self._has_outputs = any(r.alias_info is None for r in schema.returns)

    def _outputs(self, args: Any, kwargs: Any) -> Any:
        """The shapes of the results. None: only the result itself tells them."""
        if self._record is not None and hasattr(self._record, "shapes"):
            return self._record.shapes(self.bind(args, kwargs))
        key = (_key(args), _key(tuple(kwargs.items())))
        if key not in self._shapes:
            try:
                self._shapes[key] = self.op(*map(_meta, args), **{k: _meta(v) for k, v in kwargs.items()})
            except NotImplementedError:
                self._shapes[key] = None
        return self._shapes[key]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._record is not None:
            calls[self.name] += 1
            self._record.check(self.bind(args, kwargs))
        outputs = self._outputs(args, kwargs) if self._has_outputs and not self._is_out else ()
        host_args = [self._host(value) for value in args]
        host_kwargs = {name: self._host(value) for name, value in kwargs.items()}
        if outputs is None:
            synchronize()
            return _map(self._compute(host_args, host_kwargs), lambda result: result.to("npu"))
        results = kwargs["out"] if self._is_out else _map(outputs, lambda meta: poison(_allocate(meta), is_output=True))
        targets = _map(results, alias)
        queue(lambda: _store(targets, self._compute(host_args, host_kwargs)))
        return results if self._has_outputs else self._mutated(args, kwargs)

    def bind(self, args: Any, kwargs: Any) -> Call:
        """The arguments by name, with the defaults of the schema."""
        values = {a.name: a.default_value for a in self.op._schema.arguments}
        values |= dict(zip(values, args, strict=False)) | kwargs
        return Call(**values)

    def _compute(self, args: Any, kwargs: Any) -> Any:
        return self.op(*args, **kwargs) if self._record is None else self._record.compute(self.bind(args, kwargs))

    def _mutated(self, args: Any, kwargs: Any) -> Any:
        tensors = [kwargs[name] if name in kwargs else args[self._positions[name]] for name in self.written]
        count = len(self.op._schema.returns)
        return None if count == 0 else tensors[0] if count == 1 else tuple(tensors)


def _allocate(meta: Tensor) -> Tensor:
    return _EMPTY_STRIDED(meta.size(), meta.stride(), dtype=meta.dtype, device=torch.device("npu", 0))


def _store(targets: Any, results: Any) -> None:
    """Copy results to the outputs. None: the work has written them itself."""
    if results is None:
        return
    if isinstance(targets, Tensor):
        targets.copy_(results)
    elif targets:
        for target, result in zip(targets, results, strict=True):
            _store(target, result)


# The ops that move or allocate memory


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    ends = [tensor if tensor.device.type == "cpu" else alias(tensor) for tensor in (target, source)]
    host = [tensor for tensor in (target, source) if tensor.device.type == "cpu"]
    if all(non_blocking and tensor.is_pinned() for tensor in host):
        queue(lambda: ends[0].copy_(ends[1]))  # holds the host tensor
    else:
        synchronize()
        ends[0].copy_(ends[1])
    return target


def _to_copy(
    source: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    device = device or source.device
    pinned = bool(pin_memory) or (non_blocking and device.type == "cpu")
    memory_format = memory_format or torch.preserve_format
    target = torch.empty_like(source, dtype=dtype, device=device, pin_memory=pinned, memory_format=memory_format)
    if device.type == "cpu":
        _fill_poison(target)
    return _copy(target, source, non_blocking)


def _contiguous(tensor: Tensor, *, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    return tensor if tensor.is_contiguous(memory_format=memory_format) else tensor.clone(memory_format=memory_format)


def _format_cast(tensor: Tensor, acl_format: int, *, customize_dtype: Any = None, input_dtype: Any = None) -> Tensor:
    """The format of the result is `acl_format` to torch_npu; its memory stays row-major."""
    options = {"dtype": tensor.dtype, "device": tensor.device, "acl_format": acl_format}
    return _copy(torch.ops.npu.empty_with_format(tensor.size(), **options), tensor)


def _scalar(tensor: Tensor) -> Any:
    synchronize()
    return alias(tensor).item()


_real = {
    name: torch.library.get_kernel(f"aten::{name}", "PrivateUse1") for name in ("empty.memory_format", "empty_strided")
}
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)


def _EMPTY_STRIDED(*args: Any, **kwargs: Any) -> Tensor:
    return _real["empty_strided"].call_boxed(_KEYS, *args, **kwargs)


SPECIAL: dict[str, Compute] = {
    "aten::copy_": _copy,
    "npu::npu_format_cast": _format_cast,
    "aten::_to_copy": _to_copy,
    "aten::contiguous": _contiguous,
    "aten::_local_scalar_dense": _scalar,
    "aten::empty_strided": lambda *args, **kwargs: poison(_EMPTY_STRIDED(*args, **kwargs)),
    "aten::empty.memory_format": lambda *args, **kwargs: poison(
        _real["empty.memory_format"].call_boxed(_KEYS, *args, **kwargs)
    ),
}

# torch_npu's own kernels of these change no memory.
KEPT = {
    f"aten::{name}"
    for name in "resize_ set_ set_.source_Storage set_.source_Storage_storage_offset set_.source_Tensor record_stream "
    "is_pinned _pin_memory empty_like new_empty_strided _copy_from_and_resize _lazy_clone is_set_to".split()
} | {"npu::npu_change_data_ptr"}


def _is_replaced(name: str) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if name in SPECIAL:
        return True
    if name in KEPT or not (has(name, "PrivateUse1") or has(name, "CPU")):
        return False
    base, _, overload = name.partition(".")
    try:
        schema = torch._C._get_schema(base, overload)
    except RuntimeError:  # not in this version of torch
        return False
    return all(result.alias_info is None or result.alias_info.is_write for result in schema.returns)


_libraries = {name: torch.library.Library(name, "IMPL") for name in ("aten", "npu", "atb")}


def replace(name: str, kernel: Compute) -> None:
    """Make `kernel` the op's kernel on NPU tensors."""
    space, _, rest = name.partition("::")
    _libraries[space].impl(rest, kernel, "PrivateUse1", allow_override=True)


def _attention(*args: Any, scale: float | None = None, enable_gqa: bool = False) -> Tensor:
    """torch's attention by products and a softmax; torch_npu's own calls a fused op."""
    result: Tensor = torch.ops.aten._scaled_dot_product_attention_math(*args, scale=scale, enable_gqa=enable_gqa)[0]
    return result


def install() -> None:
    """Replace the kernels of torch_npu."""
    replace("aten::scaled_dot_product_attention", _attention)
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and _is_replaced(name):
            replace(name, SPECIAL.get(name) or Kernel(name))
        elif name in SPECIAL:
            replace(name, SPECIAL[name])
        elif name.startswith(("npu::npu_", "npu::_npu", "atb::")) and name not in KEPT:
            replace(name, _without_reference(name))
    for record in OPS:
        for name in record.names:
            replace(name, Kernel(name, record))


def _without_reference(name: str) -> Compute:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"the fake NPU has no reference for {name}: add one to tests/npu/ops")

    return kernel
