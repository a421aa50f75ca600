"""Caches packed weights in a file. Later starts read the file directly into the memory that the kernels read.

One safetensors file per quantisation. Its fingerprint covers the model files, the quantisation and the layout of the
device, so a file of another model, version or layout is not used. The last tensor has checksums of all other bytes, so
a corrupt file is detected.
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
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...engine.errors import ModelRefused
from ...engine.modelfiles import ModelFiles
from ...engine.tensorfiles import StoredTensor, read_header
from ...kernels.ops.linear import Fp8, Int4, Int8, weight_tensors
from ...kernels.ops.projection import Product
from .checksums import Checksums, count, read_checked
from .mapped import DTYPES

VERSION = 2  # of the file format
ALIGNMENT = 64  # bytes, for every tensor: the width of the widest vector loads
SPARE = 2**30  # bytes of disk space that stay free
SUMS = "~sums"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

log = logging.getLogger(__name__)


def fingerprint(files: ModelFiles, quant: str, sample: Any) -> str:
    """SHA-256 of the model files' headers, sizes and times, of `quant`, and of `sample`: a constant weight, quantised
    and packed by this device, which stands for the layout."""
    digest = hashlib.sha256(f"{VERSION} {quant}".encode())
    digest.update((files.path / "config.json").read_bytes())
    for file in sorted({tensor.file for tensor in files.tensors.values()}):
        status = file.stat()
        digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(8 + struct.unpack("<Q", opened.read(8))[0]))
    digest.update(type(sample).__name__.encode())
    for part in weight_tensors(sample):
        digest.update(_bytes(part))
    return digest.hexdigest()


@runtime_checkable
class Placed(Protocol):
    """A packed weight that sets the placement of its memory (NUMA) before the memory is written."""

    def place(self) -> None: ...


class PackedFile:
    """The products of one model in one quantisation. An unreadable or corrupt file is written again.

    `kind` is the device's named tuple of a packed weight. Weights may also have the types of kernels.ops.
    """

    def __init__(self, file: Path, fingerprint: str, kind: type[Any]) -> None:
        self._file = file
        self._fingerprint = fingerprint
        self._kinds: dict[str, type[Any]] = {known.__name__: known for known in (Int8, Int4, Fp8, kind)}

    def read(self) -> Mapping[str, Product] | None:
        """Products by name, without their biases. None if the file is missing, corrupt or has another fingerprint."""
        try:
            tensors = read_header(self._file)
            with self._file.open("rb") as opened:
                prefix = opened.read(8)
                header = opened.read(*struct.unpack("<Q", prefix))
                about = json.loads(header).get("__metadata__", {})
                if about.get("fingerprint") != self._fingerprint:
                    return None
                start = 8 + len(header)
                stop = tensors[SUMS].start
                arena = _arena(stop - start)
                products = self._products(about, tensors, arena, start)
                opened.seek(stop)
                sums = struct.unpack(f"<{count(stop - start)}I", opened.read())
                if sums[0] != zlib.crc32(prefix + header) or not read_checked(
                    opened.fileno(), start, memoryview(arena)[: stop - start], sums[1:], torch.get_num_threads()
                ):
                    log.warning("%s is corrupt; the weights are quantised again", self._file)
                    return None
        except (ModelRefused, OSError, ValueError, KeyError, struct.error):
            return None
        return products

    def _products(
        self, about: Mapping[str, str], tensors: Mapping[str, StoredTensor], arena: mmap.mmap, start: int
    ) -> dict[str, Product]:
        """Products as views of the arena, which is read later. Its first byte is byte `start` of the file."""
        views = {
            name: torch.frombuffer(
                arena, dtype=DTYPES[stored.dtype], count=math.prod(stored.shape), offset=stored.start - start
            ).view(stored.shape)
            for name, stored in tensors.items()
            if stored.num_bytes and not name.startswith("~")
        }
        products = {name: self._product(name, entry, views) for name, entry in json.loads(about["weights"]).items()}
        for product in products.values():
            if isinstance(product.weight, Placed):
                product.weight.place()
        return products

    def _product(self, name: str, entry: Mapping[str, Any], views: Mapping[str, Tensor]) -> Product:
        fields = [views[f"{name}:{at}"] if value is None else value for at, value in enumerate(entry["fields"])]
        return Product(entry["op"], self._kinds[entry["kind"]](*fields))

    def write(self, products: Mapping[str, Product]) -> None:
        """Write the file atomically. Logs errors and does not raise: the model runs without the file."""
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
        """The contents of the file, in order."""
        tensors: list[tuple[str, Tensor]] = []
        weights: dict[str, object] = {}
        end = 0
        for name, product in products.items():
            weight = product.weight
            weights[name] = {
                "op": product.op,
                "kind": type(weight).__name__,
                "fields": [None if isinstance(value, Tensor) else value for value in weight],
            }
            for at, value in enumerate(weight):
                if isinstance(value, Tensor):
                    tensors.append((f"{name}:{at}", value))
                    end += value.nbytes
                    if missing := -end % ALIGNMENT:
                        tensors.append((f"~{len(tensors)}", torch.zeros(missing, dtype=torch.uint8)))
                        end += missing
        header: dict[str, object] = {
            "__metadata__": {"fingerprint": self._fingerprint, "weights": json.dumps(weights)},
        }
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


def _entry(dtype: str, shape: Sequence[int], start: int, stop: int) -> dict[str, object]:
    """The header entry of a tensor."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def _bytes(tensor: Tensor) -> memoryview:
    plain: Any = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy()
    return memoryview(plain)


def _arena(size: int) -> mmap.mmap:
    """Memory in huge pages if the system has them: every decode step reads all of it."""
    arena = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            arena.madvise(mmap.MADV_HUGEPAGE)
    return arena
