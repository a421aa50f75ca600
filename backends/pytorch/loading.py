"""Loads the weights of a model on a device. Estimates their memory, and caches quantised weights in a packed file."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any, TypeVar

import torch

from ...engine.files.adapter_files import ABSORBED, EXPERTS
from ...engine.files.model_files import ModelFiles
from ...engine.files.tensor_files import StoredTensor
from ...engine.options import LoadOptions
from ...kernels.ops.linear import Mxfp4, weight_tensors
from ...kernels.ops.linear_mxfp4 import GROUP
from .device import Device
from .lora import AdapterSlots, slot_values
from .mapped import DTYPES
from .packed import PackedFile, fingerprint
from .quant import memory_bytes
from .quant.choose import ON_LOAD, scheme
from .quant.compressed_tensors import converted_values
from .quant.floats import STORED
from .weights import Weights

MIN_PACKED_BYTES = 64 * 2**20  # smaller models get no packed file: quantising them is fast
EMBEDDING = "model.embed_tokens.weight"
LAYER_INPUTS = "model.embed_tokens_per_layer.weight"  # a table of inputs of layers
_EXAMPLE = (64, 256)  # shape of the example weight

_MXFP4 = ("blocks", "scales", ".weight_packed", ".weight_scale")  # ends of the names of MXFP4 tensors

Model = TypeVar("Model")


class Loader:
    """Loads the weights of one model on one device, for activations of `dtype`. The constructor raises ModelRefused for
    an unsupported weight format."""

    def __init__(self, files: ModelFiles, options: LoadOptions, device: Device, dtype: torch.dtype) -> None:
        self._files = files
        self._device = device
        self._dtype = dtype
        self._quant = options.quant
        self._scheme = scheme(options.quant, files, device.type, device.static_inputs)
        self._adapter_rank = options.adapter_rank
        self._packed: PackedFile | None = None
        if options.packed_dir is not None and self._quant != "none" and files.weight_bytes >= MIN_PACKED_BYTES:
            example = self._example(torch.float32)
            expert_example = self._expert_example(torch.float32)
            key = fingerprint(files, self._quant, example, expert_example)
            kinds = type(example), type(expert_example)
            self._packed = PackedFile(options.packed_dir / f"{self._quant}.safetensors", key, *kinds)

    def expected_token_bytes(self) -> int:
        """Estimated bytes of the weights that are read to compute one token: all except an embedding table that the
        output head does not use, and except the experts that the token does not use."""
        moe = self._files.config.moe
        share = 1.0 if moe is None else moe.top_k / moe.experts
        return self._expected_bytes(share) - self._table_bytes() - self._layer_input_bytes()

    def expected_bytes(self) -> int:
        """Estimated bytes of the loaded weights, correct within a few percent."""
        return self._expected_bytes(1.0)

    def _expected_bytes(self, expert_share: float) -> int:
        """Estimated bytes of the loaded weights, with the share `expert_share` of the experts."""

        @cache
        def value_bytes(stored: str, is_expert: bool) -> float:
            """Bytes in memory per value of a packed weight that has the dtype `stored` in the file."""
            example = self._expert_example if is_expert else self._example
            return memory_bytes(example(DTYPES[stored])) / prod(_EXAMPLE)

        @cache
        def mxfp4_bytes(is_expert: bool) -> float:
            return self._mxfp4_bytes(is_expert)

        total = float(self._absorbed_bytes())
        for name, tensor in self._files.tensors.items():
            parts = name.split(".")
            is_expert = EXPERTS in parts
            share = expert_share if is_expert else 1.0
            if ABSORBED in parts:
                continue
            if self._is_mxfp4(name):
                total += tensor.num_bytes * mxfp4_bytes(is_expert) * share
            elif self._is_product(name, tensor, is_expert):
                total += prod(tensor.shape) * value_bytes(tensor.dtype, is_expert) * share
            elif name != EMBEDDING:
                values = self._converted_values(name, tensor)
                size = tensor.num_bytes if values is None else values * value_bytes("BF16", is_expert)
                total += size * share
        return round(total) + self._table_bytes()

    def _converted_values(self, name: str, tensor: StoredTensor) -> int | None:
        """The number of bfloat16 values that a quantised tensor becomes; None if its bytes stay."""
        quantization = self._files.config.quantization
        if quantization is None:
            return None
        return converted_values(quantization, name, tensor.dtype, tensor.num_bytes)

    def _is_product(self, name: str, tensor: StoredTensor, is_expert: bool) -> bool:
        """Whether the tensor is a weight of floats that is packed: a matrix, or the matrices of all experts."""
        if (
            tensor.dtype not in STORED
            or name == LAYER_INPUTS
            or (name == EMBEDDING and not self._files.config.tie_embeddings)
        ):
            return False
        return len(tensor.shape) == 2 or (is_expert and len(tensor.shape) == 3)

    def _absorbed_bytes(self) -> int:
        """Bytes of the projections from latents to keys and values: see Weights.dequantised."""
        config = self._files.config
        if config.latent is None:
            return 0
        outputs = config.num_heads * (config.latent.plain_dim + config.latent.value_dim)
        return config.num_layers * outputs * config.latent.rank * self._dtype.itemsize

    def _is_mxfp4(self, name: str) -> bool:
        quantization = self._files.config.quantization
        return quantization is not None and quantization.format == "mxfp4" and name.endswith(_MXFP4)

    def _mxfp4_bytes(self, is_expert: bool) -> float:
        """Bytes of a packed MXFP4 weight in memory, divided by its bytes in the file."""
        out_features, in_features = _EXAMPLE
        numbers = torch.zeros(out_features, in_features // 2, dtype=torch.uint8)
        example = Mxfp4(numbers, torch.zeros(out_features, in_features // GROUP, dtype=torch.uint8))
        pack = self._pack_expert if is_expert else self._pack
        return memory_bytes(pack(example)) / memory_bytes(example)

    def _table_bytes(self) -> int:
        """Bytes of the embedding table; 0 if the output head has the same weight and shares its memory."""
        embedding = self._files.tensors.get(EMBEDDING)
        if embedding is None:
            return 0
        is_tied = self._files.config.tie_embeddings and embedding.dtype in STORED
        if is_tied and self._keeps_values(DTYPES[embedding.dtype]):
            return 0
        return embedding.num_bytes

    def _layer_input_bytes(self) -> int:
        table = self._files.tensors.get(LAYER_INPUTS)
        return 0 if table is None else table.num_bytes

    def _keeps_values(self, stored: torch.dtype) -> bool:
        """Whether a packed weight has a tensor that equals the weight in the file, which has the dtype `stored`."""
        plain = self._plain_example(stored)
        packed = weight_tensors(self._example(stored))
        return any(tensor.dtype == stored and torch.equal(tensor, plain) for tensor in packed)

    def load(self, build: Callable[[Weights], Model], adapter_slots: int) -> tuple[Model, Weights]:
        """The model that `build` returns, and its weights. Raises ModelRefused if the files do not fit the model."""
        products = None if self._packed is None else self._packed.read()
        values = slot_values(self._files.config, self._adapter_rank) if adapter_slots else 0
        base = self._files.tensors
        slots = AdapterSlots(adapter_slots, self._adapter_rank, values, self._device, self._dtype, base)
        weights = Weights(self._files, self._device, self._dtype, self._scheme, products or {}, slots)
        model = build(weights)
        weights.close()
        if self._packed is not None and products is None:
            self._packed.write(weights.products)
        return model, weights

    def _example(self, stored: torch.dtype) -> Any:
        """A small example weight of dtype `stored`, quantised and packed in the same way as the model's weights."""
        return self._pack(self._quantised_example(stored))

    def _expert_example(self, stored: torch.dtype) -> Any:
        """The same example, packed in the same way as the model's experts."""
        return self._pack_expert(self._quantised_example(stored))

    def _pack(self, example: Any) -> Any:
        return self._device.ops.linear.pack(example, self._dtype)

    def _pack_expert(self, example: Any) -> Any:
        return self._device.ops.moe.pack_slices([example], 1, _EXAMPLE[0], self._dtype)

    def _quantised_example(self, stored: torch.dtype) -> Any:
        plain = self._plain_example(stored)
        quantise = ON_LOAD[self._quant]
        return plain if quantise is None else quantise(plain)

    def _plain_example(self, stored: torch.dtype) -> torch.Tensor:
        return torch.linspace(-1.0, 1.0, prod(_EXAMPLE)).view(_EXAMPLE).to(stored)
