"""Caches packed weights in a file. Later starts read the file directly into the memory that the kernels read.

There is one safetensors file per quantisation. Its fingerprint covers the model files, the quantisation and the layout
of packed weights on the device, so the file is used only if all of these are unchanged. Its last tensor has the
checksums of all other bytes, so a corrupt file is detected.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import mmap
import os
import shutil
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, BinaryIO, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...engine.errors import ModelRefused
from ...engine.files.model_files import ModelFiles
from ...engine.files.tensor_files import StoredTensor, read_header
from ...kernels.ops.linear import Fp8, Int4, Int8, weight_tensors
from ...kernels.ops.projection import Product
from .checksums import Checksums, count, read_checked
from .mapped import DTYPES

VERSION = 3  # version of the file format
ALIGNMENT = 64  # bytes; every tensor starts at a multiple, because the widest vector loads have this width
SPARE = 2**30  # bytes of disk space that stay free
SUMS = "~sums"  # name of the tensor with the checksums; names that start with ~ are no weights
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

log = logging.getLogger(__name__)


def fingerprint(files: ModelFiles, quant: str, *examples: Any) -> str:
    """SHA-256 of the model files' headers, sizes and times, of `quant`, and of `examples`: constant weights that
    this device has quantised and packed, so their bytes depend on the device's layouts of packed weights."""
    digest = hashlib.sha256(f"{VERSION} {quant}".encode())
    digest.update((files.path / "config.json").read_bytes())
    for file in sorted({tensor.file for tensor in files.tensors.values()}):
        status = file.stat()
        digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(8 + struct.unpack("<Q", opened.read(8))[0]))
    for example in examples:
        digest.update(type(example).__name__.encode())
        for part in weight_tensors(example):
            digest.update(_bytes(part))
    return digest.hexdigest()


@runtime_checkable
class Placeable(Protocol):
    """A packed weight that can choose the NUMA nodes of its memory."""

    def place(self) -> None:
        """Choose the nodes, before the memory of the weight is written."""
        ...


class PackedFile:
    """A file with the products of one model in one quantisation. A file that is not readable or corrupt is replaced.

    `kinds` are the device's classes of packed weights, named tuples. The file may also have weights of the classes
    Int8, Int4 and Fp8.
    """

    def __init__(self, file: Path, fingerprint: str, *kinds: type[Any]) -> None:
        self._file = file
        self._fingerprint = fingerprint
        self._kinds: dict[str, type[Any]] = {one.__name__: one for one in (Int8, Int4, Fp8, *kinds)}

    def read(self) -> Mapping[str, Product] | None:
        """The packed products by name, without their biases. None if the file is missing, corrupt or has another
        fingerprint."""
        try:
            tensors = read_header(self._file)
            with self._file.open("rb") as opened:
                return self._read(opened, tensors)
        except (ModelRefused, OSError, ValueError, KeyError, struct.error):
            return None

    def _read(self, opened: BinaryIO, tensors: Mapping[str, StoredTensor]) -> Mapping[str, Product] | None:
        """The packed products in the file `opened`; `tensors` is its parsed header. None as in `read`."""
        prefix = opened.read(8)
        header = opened.read(*struct.unpack("<Q", prefix))
        metadata = json.loads(header).get("__metadata__", {})
        if metadata.get("fingerprint") != self._fingerprint:
            return None
        start = 8 + len(header)
        size = tensors[SUMS].start - start
        arena = allocate(size)
        products = self._products(metadata, tensors, arena, start)  # before the arena is written: see Placeable
        opened.seek(start + size)
        sums = struct.unpack(f"<{count(size)}I", opened.read())
        data = memoryview(arena)[:size]
        is_intact = sums[0] == zlib.crc32(prefix + header)
        if is_intact and read_checked(opened.fileno(), start, data, sums[1:], torch.get_num_threads()):
            return products
        log.warning("%s is corrupt; the weights are quantised again", self._file)
        return None

    def _products(
        self, metadata: Mapping[str, str], tensors: Mapping[str, StoredTensor], arena: mmap.mmap, start: int
    ) -> dict[str, Product]:
        """The packed products as views of the arena, which is filled later. Byte 0 of the arena is byte `start` of the
        file."""
        views = {}
        for name, stored in tensors.items():
            if stored.num_bytes and not name.startswith("~"):
                offset = stored.start - start
                size = math.prod(stored.shape)
                values = torch.frombuffer(arena, dtype=DTYPES[stored.dtype], count=size, offset=offset)
                views[name] = values.view(stored.shape)
        weights = json.loads(metadata["weights"])
        products = {name: self._product(name, entry, views) for name, entry in weights.items()}
        for product in products.values():
            if isinstance(product.weight, Placeable):
                product.weight.place()
        return products

    def _product(self, name: str, entry: Mapping[str, Any], views: Mapping[str, Tensor]) -> Product:
        fields = list(entry["fields"])
        for index in entry["tensors"]:
            fields[index] = views[f"{name}:{index}"]
        return Product(entry["op"], self._kinds[entry["kind"]](*fields))

    def write(self, products: Mapping[str, Product]) -> None:
        """Write the file atomically. Logs an error and does not raise it: the model runs without the file."""
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            needed = sum(part.nbytes for product in products.values() for part in weight_tensors(product.weight))
            if needed + SPARE > shutil.disk_usage(self._file.parent).free:
                log.warning("the packed weights are not cached: not enough disk space for %d bytes", needed)
                return
            with NamedTemporaryFile(dir=self._file.parent, prefix=".writing-", delete=False) as opened:
                try:
                    for block in self._blocks(products):
                        opened.write(block)
                    opened.close()
                    os.replace(opened.name, self._file)  # noqa: PTH105
                except BaseException:
                    Path(opened.name).unlink(missing_ok=True)
                    raise
        except OSError as error:
            log.warning("cannot cache the packed weights in %s: %s", self._file.parent, error.strerror or error)

    def _blocks(self, products: Mapping[str, Product]) -> Iterator[Any]:
        """The blocks of bytes that make up the file, in order."""
        weights = {name: _described(product) for name, product in products.items()}
        metadata = {"fingerprint": self._fingerprint, "weights": json.dumps(weights)}
        header: dict[str, object] = {"__metadata__": metadata}
        tensors = _tensors(products)
        end = 0
        for name, tensor in tensors:
            header[name] = _entry(_NAMES[tensor.dtype], tensor.shape, end, end + tensor.nbytes)
            end += tensor.nbytes
        header[SUMS] = _entry("U32", [count(end)], end, end + 4 * count(end))
        text = json.dumps(header).encode()
        text = struct.pack("<Q", len(text)) + text
        yield text
        sums = Checksums(text)
        for _, tensor in tensors:
            data = _bytes(tensor)
            sums.add(data)
            yield data
        yield struct.pack(f"<{count(end)}I", *sums.values)


def _described(product: Product) -> dict[str, object]:
    """The op and the fields of a product's packed weight, for the header of the file. `tensors`: the indices of the
    fields that are tensors; the file has each under the name "product name:field index"."""
    fields = [None if isinstance(value, Tensor) else value for value in product.weight]
    tensors = [index for index, value in enumerate(product.weight) if isinstance(value, Tensor)]
    return {"op": product.op, "kind": type(product.weight).__name__, "fields": fields, "tensors": tensors}


def _tensors(products: Mapping[str, Product]) -> list[tuple[str, Tensor]]:
    """The tensors of the products by their names in the file, each followed by zeros up to a multiple of ALIGNMENT."""
    tensors: list[tuple[str, Tensor]] = []
    for name, product in products.items():
        for index, value in enumerate(product.weight):
            if isinstance(value, Tensor):
                padding = torch.zeros(-value.nbytes % ALIGNMENT, dtype=torch.uint8)
                tensors += [(f"{name}:{index}", value), (f"~{len(tensors)}", padding)]
    return tensors


def _entry(dtype: str, shape: Sequence[int], start: int, stop: int) -> dict[str, object]:
    """The header entry of a tensor."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def _bytes(tensor: Tensor) -> memoryview:
    plain: Any = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy()
    return memoryview(plain)


def allocate(size: int) -> mmap.mmap:
    """`size` bytes of zeros, in huge pages if the system has them: every decode step reads all of the weights. A page
    takes no memory until it is written."""
    arena = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the Linux kernel may not support huge pages
            arena.madvise(mmap.MADV_HUGEPAGE)
    return arena
