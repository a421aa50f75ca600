"""Reads weights from safetensors files by name and exact shape. A tensor that the model does not use is an error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...engine.errors import ModelRefused
from ...engine.files.model_files import ModelFiles
from ...engine.files.tensor_files import StoredTensor
from ...kernels.ops.layer import DecoderLayer
from ...kernels.ops.linear import Weight, map_tensors, weight_tensors
from ...kernels.ops.mlp import Experts
from ...kernels.ops.projection import Product, Projection, SideBySide
from .device import Device
from .lora import AdapterSlots
from .mapped import MappedFiles
from .quant import SLICE_VALUES, Loaded, Scheme, Tensors, memory_bytes, slices
from .quant.floats import STORED, Floats, check_finite

WIDE = "F64"  # read as float32, as transformers does


class StoredTensors:
    """The tensors of a model's files, memory-mapped. Each may be read once."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self._unread = dict(files.tensors)
        self._maps = MappedFiles()
        self._read: list[StoredTensor] = []
        self._provided: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._unread or name in self._provided

    def provide(self, name: str, tensor: Tensor) -> None:
        """Let the next read of `name` return this tensor, which was computed from tensors of the files."""
        self._provided[name] = tensor

    def dtype(self, name: str) -> str:
        """See quant.Tensors.dtype."""
        return self._unread[name].dtype if name in self._unread else ""

    def shape(self, name: str) -> tuple[int, ...]:
        """See quant.Tensors.shape."""
        return self._unread[name].shape if name in self._unread else (0,)

    def read(self, name: str, shape: Sequence[int], dtypes: Sequence[str]) -> Tensor:
        """See quant.Tensors.read."""
        if name in self._provided:
            return self._provided.pop(name).view(*shape)
        stored = self.check(name, shape, dtypes)
        self._read.append(stored)
        tensor = self._maps.tensor(stored)
        return tensor.float() if stored.dtype == WIDE else tensor

    def check(self, name: str, shape: Sequence[int], dtypes: Sequence[str]) -> StoredTensor:
        """Check a tensor and mark it as read, without access to its data. Raises ModelRefused as `read` does."""
        stored = self._unread.pop(name, None)
        if stored is None:
            raise ModelRefused(f"{self._files.name}: tensor {name!r} is missing, expected {list(shape)}")
        where = f"{stored.file.name}: tensor {name!r}"
        if stored.shape != tuple(shape):
            raise ModelRefused(f"{where} must be {list(shape)} (config.json), not {list(stored.shape)}")
        is_readable = stored.dtype in dtypes or (stored.dtype == WIDE and "F32" in dtypes)
        if not is_readable:
            kinds = dtypes[0] if len(dtypes) == 1 else f"one of {', '.join(dtypes)}"
            raise ModelRefused(f"{where} must be {kinds}, not {stored.dtype}")
        return stored

    def mark_unread(self, name: str) -> None:
        """Allow the tensor to be read once more."""
        self._unread[name] = self._files.tensors[name]

    def drop_pages(self) -> None:
        """Release the pages of all tensors that were read. Their views stay valid: an access reads the file again."""
        for stored in self._read:
            self._maps.drop(stored)

    def release(self) -> None:
        """Release the pages of all tensors read so far. Their views must not be used again: they would read pages that
        are not released later."""
        self.drop_pages()
        self._read.clear()

    def close(self) -> None:
        """Raises ModelRefused if a tensor was not read, except biases of zeros: the files belong to another model."""
        unexpected = sorted(name for name in self._unread if not self._is_zero_bias(name))
        if unexpected:
            first = unexpected[0]
            raise ModelRefused(
                f"{self._unread[first].file.name}: {len(unexpected)} tensors are not part of "
                f"{self._files.config.model_type}, the first is {first!r:.200}",
                "config.json names another architecture than that of the weights, or a value of it is wrong",
            )

    def _is_zero_bias(self, name: str) -> bool:
        """Exporters store a bias of zeros for projections that have no bias in the model."""
        stored = self._unread[name]
        return name.endswith(".bias") and stored.dtype in STORED and not self._maps.tensor(stored).any()


def _refuse_bias(name: str, weight: Loaded) -> None:
    if weight.bias is not None:
        raise ModelRefused(f"{name}: static scales of activations are not supported here", "use a W8A8_DYNAMIC model")


class Weights:
    """Reads the weights of a model that is being built. The device packs each weight slice by slice. After each slice
    the pages of the file are released, so memory never has two copies of a weight.

    `cached` has packed products from the packed file, by the names of their projections joined with "+".
    """

    def __init__(
        self,
        files: ModelFiles,
        device: Device,
        dtype: torch.dtype,
        scheme: Scheme,
        cached: Mapping[str, Product] = MappingProxyType({}),
        slots: AdapterSlots | None = None,
    ) -> None:
        self.dtype = dtype  # dtype of activations
        self.device = device.type
        self.products: dict[str, Product] = {}  # the products created so far, with the same names as in `cached`
        self.bytes = 0  # bytes of all weights loaded so far
        # Bytes that a token reads: all weights, but of the experts only those that it uses, and no embedding table.
        self.token_bytes = 0
        self._files = files
        self._device = device
        self.device = device.type
        self._scheme = scheme
        # For projections that stay floats when the weights are quantised while loading.
        self._unquantised = Floats() if isinstance(scheme, Floats) else scheme
        self._cached = cached
        self.tensors = StoredTensors(files)
        self._tied_product: Projection | None = None  # the output head, if it has the weight of the embedding
        self.slots = slots or AdapterSlots(0, 0, 0, device, dtype)
        self.shared_experts: list[Experts] = []  # the MLPs with a shared expert that were built so far

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        """A small tensor, copied to the device in its stored dtype. Raises ModelRefused if its shape is not `shape`."""
        tensor = self.tensors.read(name, shape, STORED)
        check_finite(name, tensor)
        self.bytes += tensor.nbytes
        self.token_bytes += tensor.nbytes
        return tensor.to(self._device.type, copy=True)

    def table(self, name: str, shape: Sequence[int]) -> Tensor:
        """A table in its stored dtype whose rows are inputs of layers. On the CPU it stays a mapped file."""
        tensor = self._checked_table(f"{name}.weight", shape)
        self.tensors.release()
        self.bytes += tensor.nbytes
        return tensor.to(self._device.type)

    def _checked_table(self, name: str, shape: Sequence[int]) -> Tensor:
        tensor = self.tensors.read(name, shape, STORED)
        for rows in tensor.split(max(1, SLICE_VALUES // max(1, shape[1]))):
            check_finite(name, rows)
            self.tensors.drop_pages()
        return tensor

    def embedding(self, name: str, shape: Sequence[int]) -> Tensor:
        """The embedding table in its stored dtype. On the CPU it stays a mapped file: only the used rows are read.

        If the output head has the same weight and its packed form is the table itself, both share memory.
        """
        if self._files.config.tie_embeddings:
            self._tied_product = self._linear([name], [shape[0]], shape[1], bias=False)
            self.tensors.mark_unread(f"{name}.weight")
        tensor = self._checked_table(f"{name}.weight", shape)
        shared = self._shared_table(tensor)
        self.tensors.release()
        if shared is not None:
            return shared
        self.bytes += tensor.nbytes
        return tensor.to(self._device.type)

    def _shared_table(self, stored: Tensor) -> Tensor | None:
        """The tensor of the tied output head that has the same values as the embedding table `stored`; None: none."""
        if not isinstance(self._tied_product, Product):
            return None
        rows = max(1, SLICE_VALUES // max(1, stored.shape[1]))
        for tensor in weight_tensors(self._tied_product.weight):
            is_alike = tensor.dtype == stored.dtype and tensor.shape == stored.shape
            if is_alike and torch.equal(tensor[:rows], stored[:rows].to(tensor.device)):
                return tensor
        return None

    def linear(
        self,
        names: Sequence[str],
        out_features: Sequence[int],
        in_features: int,
        bias: bool = False,
        *,
        quantise: bool = True,
    ) -> Projection:
        """One projection, or several projections of the same input. Several projections become one product if their
        formats are equal, otherwise one product each. Without `quantise`, weights that are floats in the files stay
        floats."""
        if quantise:
            base = self._linear(names, out_features, in_features, bias)
        else:
            base = self._load(self._unquantised, names, out_features, in_features, bias)
        return self.slots.adapt(names, out_features, in_features, base)

    def dequantised(self, name: str, out_features: int, in_features: int) -> Tensor:
        """The weight [out_features, in_features] of a projection in the dtype of activations, from any format in the
        files. It is not quantised while loading, and adapters cannot change it."""
        loaded = self._unquantised.load(self.tensors, name, out_features, in_features)
        _refuse_bias(name, loaded)
        weight = torch.empty(out_features, in_features, dtype=self.dtype, device=self._device.type)
        columns: Any = slice(None) if loaded.order is None else loaded.order.to(self._device.type)
        start = 0
        for part in self._device_slices([loaded]):
            values = part if isinstance(part, Tensor) else part.dense()
            weight[start : start + len(values), columns] = values.to(self.dtype)
            start += len(values)
        self.tensors.release()
        self.bytes += weight.nbytes
        self.token_bytes += weight.nbytes
        return weight

    def experts(
        self,
        name: str,
        projections: Sequence[Sequence[str]],
        out_features: int,
        in_features: int,
        token_share: float,
        source: Tensors,
    ) -> Product:
        """The weights of all experts as one weight, packed by the device's moe.pack_slices.

        `projections`: for each expert the names of its projections, each with `out_features` outputs. `name`: the name
        of the result in the packed file. `token_share`: the share of the weights that a token reads. `source`: the
        tensors of the projections. Raises ModelRefused if the projections do not have one format.
        """
        cached = self._cached.get(name)
        if cached is not None:
            for projection in chain.from_iterable(projections):
                source.read(f"{projection}.weight", (out_features, in_features), STORED)
            self.tensors.release()
            self.products[name] = self._product(cached.op, cached.weight, [], token_share=token_share)
            return self.products[name]

        loading = (self._expert(source, names, out_features, in_features) for names in projections)
        first = next(loading)
        outputs = out_features * len(first)
        expert_slices = self._expert_slices(chain([first], loading), projections)
        packed = self._device.ops.moe.pack_slices(expert_slices, len(projections), outputs, self.dtype)
        product = self._product(first[0].product, packed, [], token_share=token_share)
        self.products[name] = product
        return product

    def _expert(self, source: Tensors, names: Sequence[str], out_features: int, in_features: int) -> list[Loaded]:
        """The projections of one expert that have the same input. Raises ModelRefused as `experts` does."""
        loaded = [self._scheme.load(source, name, out_features, in_features) for name in names]
        for name, weight in zip(names, loaded, strict=True):
            if weight.order is not None:
                raise ModelRefused(
                    f"{self._files.name}: {name} has permuted inputs (desc_act), which is not supported for experts",
                    "use a model that was quantised without desc_act",
                )
            _refuse_bias(name, weight)
        return loaded

    def _expert_slices(
        self, experts: Iterable[Sequence[Loaded]], projections: Sequence[Sequence[str]]
    ) -> Iterator[Weight]:
        """Slices of the experts, copied to the device. Raises ModelRefused if a projection has another format than the
        first one."""
        stored_format: tuple[object, ...] = ()
        for names, loaded in zip(projections, experts, strict=True):
            stored_format = stored_format or loaded[0].format
            for name, weight in zip(names, loaded, strict=True):
                if weight.format != stored_format:
                    raise ModelRefused(
                        f"{self._files.name}: {name} has another weight format than {projections[0][0]}; all experts "
                        "of a layer need the same format"
                    )
            yield from self._device_slices(loaded)
            self.tensors.release()

    def _linear(self, names: Sequence[str], out_features: Sequence[int], in_features: int, bias: bool) -> Projection:
        """A projection that may be in the packed file."""
        key = "+".join(names)
        cached = self._cached.get(key)
        if cached is None:
            projection = self._load(self._scheme, names, out_features, in_features, bias)
        else:
            biases = [self._bias(*size) for size in zip(names, out_features, strict=True)] if bias else []
            for name, out in zip(names, out_features, strict=True):
                self.tensors.check(f"{name}.weight", (out, in_features), STORED)
            projection = self._product(cached.op, cached.weight, biases)
        if isinstance(projection, Product):
            self.products[key] = projection
        return projection

    def _load(
        self, scheme: Scheme, names: Sequence[str], out_features: Sequence[int], in_features: int, bias: bool
    ) -> Projection:
        """A projection from the model's files."""
        sizes = list(zip(names, out_features, strict=True))
        loaded = [scheme.load(self.tensors, name, out, in_features) for name, out in sizes]
        has_bias = bias or any(weight.bias is not None and weight.bias.any() for weight in loaded)
        biases = [self._bias(*size, weight.bias, bias) for size, weight in zip(sizes, loaded, strict=True)]
        biases = biases if has_bias else []
        if all(loaded[0].joins(other) for other in loaded[1:]):
            return self._pack(loaded, biases)
        products = []
        for index, weight in enumerate(loaded):
            products.append(self._pack([weight], biases[index : index + 1]))
        return SideBySide(tuple(products))

    def _bias(self, name: str, outputs: int, loaded: Tensor | None = None, stored: bool = True) -> Tensor:
        """The bias of a projection, float32: that of its format, else that of the files if it is `stored`, else 0."""
        if loaded is None and stored:
            return self.take(f"{name}.bias", (outputs,)).float()
        bias = torch.zeros(outputs) if loaded is None else loaded
        return bias.to(self._device.type)

    def tied_head(self, embedding: str, head: str, out_features: int, in_features: int) -> Projection:
        """The output head with the weight of the embedding. The files may have a copy (engine/files/tied_head.py)."""
        assert self._tied_product is not None, "the embedding is loaded first"
        if f"{head}.weight" in self.tensors:
            self.tensors.check(f"{head}.weight", (out_features, in_features), STORED)
        self.slots.tied_embedding = embedding
        return self.slots.adapt([head], [out_features], in_features, self._tied_product)

    def prepare(self, layer: DecoderLayer) -> Any:
        """The argument of the device's op `layer.decoder` for this layer."""
        return self._device.ops.layer.prepare(layer)

    def prepare_stack(self, layers: Sequence[Any]) -> Any:
        """The argument of the device's op `layer.decoders`, from the results of `prepare` for all layers."""
        return self._device.ops.layer.prepare_stack(layers)

    def close(self) -> None:
        """Raises ModelRefused if the files have tensors that the model did not read."""
        self.tensors.close()

    def _pack(self, loaded: Sequence[Loaded], biases: Sequence[Tensor]) -> Product:
        first = loaded[0]
        out_features = sum(one.out_features for one in loaded)
        packed = self._device.ops.linear.pack_slices(self._device_slices(loaded), out_features, self.dtype)
        self.tensors.release()
        return self._product(first.product, packed, biases, first.order)

    def _device_slices(self, loaded: Sequence[Loaded]) -> Iterator[Weight]:
        """Slices of the weight, copied to the device."""
        for weight in slices(loaded):
            yield map_tensors(weight, lambda tensor: tensor.to(self._device.type))
            self.tensors.drop_pages()

    def _product(
        self,
        product: str,
        weight: Any,
        biases: Sequence[Tensor],
        order: Tensor | None = None,
        *,
        token_share: float = 1.0,
    ) -> Product:
        """A product with a packed weight. `token_share`: the share of the weight that one token reads."""
        device = self._device.type
        on_device = self._device.layout.lay_out(product, map_tensors(weight, lambda tensor: tensor.to(device)))
        bias = torch.cat(list(biases)) if biases else None
        size = memory_bytes(on_device)
        self.bytes += size
        self.token_bytes += round(size * token_share)
        return Product(product, on_device, bias, None if order is None else order.to(device))
