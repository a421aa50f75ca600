"""The work of each op in a model: arguments, the bytes and operations that it needs at least, and the same in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import product
from typing import Any

import torch
from shapes import Shape
from torch import Tensor
from torch.nn import functional as F

from localllm.kernels.ops import Ops
from localllm.kernels.ops.attention import Rows, latent_attention
from localllm.kernels.ops.cases.lora import random_adapters, random_weights
from localllm.kernels.ops.linear import Fp8, Int4, Int8, Mxfp4
from localllm.kernels.ops.moe import ExpertWeights, Routed, Routing, route
from localllm.kernels.ops.sampling import Draws

PAGE = 16
GROUP = 64  # inputs of a scale
REPEATED = 1 << 23  # random numbers that weights repeat: too many for a processor to predict
ADAPTERS = 4
RANK = 16
LATENT = 16, 64, 512  # heads, rotary dimension and rank of DeepSeek-V2-Lite
ROUTING = Routing(8, "softmax", True)
FLOATS = ("f32", "bf16", "tile_bf16")
INTEGERS = ("int8", "tile_int8")

Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Work:
    """A benchmark case of an op. `make` returns new arguments on the CPU; `reference` computes the same with torch."""

    op: str  # "family.name", an op of Ops
    label: str
    make: Callable[[], Arguments]
    bytes: float
    reference: Callable[..., Any] | None = None  # None: that of kernels/ops
    operations: float = 0.0  # a multiply-add counts as two
    kinds: Sequence[str] = FLOATS  # instructions for the op (peaks.py); the fastest kind sets the bound
    packs: Sequence[str] = ()  # weights that the device packs before the measurement


@dataclass(frozen=True, slots=True)
class Format:
    op: str
    bytes: float  # of a weight
    kinds: Sequence[str]


FORMATS = {
    "bf16": Format("dense", 2.0, FLOATS),
    "int8": Format("int8", 1.0, INTEGERS),
    "int4": Format("int4", 0.5 + 3 / GROUP, INTEGERS),
    "int4_wide": Format("int4_wide", 0.5 + 3 / GROUP, FLOATS),
    "fp8": Format("fp8", 1.0, FLOATS),
    "mxfp4": Format("mxfp4", 0.5 + 1 / 32, FLOATS),
}


def randn(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape).to(dtype)


def numbers(*shape: int) -> Tensor:
    """Normal values [out_features, in_features] in float32. They repeat, which is faster to make."""
    count = shape[0] * shape[1]
    return _normals().repeat(-(-count // REPEATED))[:count].view(shape)


def octets(*shape: int) -> Tensor:
    """Random bytes [out_features, bytes]."""
    count = shape[0] * shape[1]
    return _normals().view(torch.uint8).repeat(-(-count // (4 * REPEATED)))[:count].view(shape)


@cache
def _normals() -> Tensor:
    return torch.randn(REPEATED)


def random_weight(fmt: str, in_features: int, out_features: int) -> Any:
    """A random weight, because the speed depends on the data."""

    def scale(*shape: int) -> Tensor:
        return torch.rand(out_features, *shape) / in_features

    match fmt:
        case "bf16":
            return numbers(out_features, in_features).bfloat16()
        case "int8":
            return Int8(octets(out_features, in_features).view(torch.int8).clamp(min=-127), scale())
        case "fp8":
            return Fp8(numbers(out_features, in_features).to(torch.float8_e4m3fn), scale(1), in_features)
        case "mxfp4":
            exponent = torch.randint(110, 116, (out_features, in_features // 32), dtype=torch.uint8)
            return Mxfp4(octets(out_features, in_features // 2), exponent)
    groups = -(-in_features // GROUP)
    zero = torch.randint(0, 17, (out_features, groups), dtype=torch.uint8)
    return Int4(octets(out_features, in_features // 2), scale(groups).half(), zero, GROUP, in_features)


def linear(shape: Shape, formats: Sequence[str], rows: Sequence[int], dtype: torch.dtype) -> Iterator[Work]:
    queries = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    hidden, inner = shape.hidden, shape.inner
    matrices = [(queries + 2 * keys, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner)]
    sizes = [*product(rows, matrices), (1, (shape.vocab, hidden))]
    for fmt, (count, (out_features, in_features)) in product(formats, sizes):
        yield Work(
            f"linear.{FORMATS[fmt].op}",
            f"{fmt}, {count} × {in_features} × {out_features}",
            partial(_linear, dtype, fmt, count, in_features, out_features),
            FORMATS[fmt].bytes * in_features * out_features + dtype.itemsize * count * (in_features + out_features),
            partial(_dense, out_features),
            2.0 * count * in_features * out_features,
            FORMATS[fmt].kinds,
            ("weight",),
        )


def _linear(dtype: torch.dtype, fmt: str, count: int, in_features: int, out_features: int) -> Arguments:
    return {"x": randn(dtype, count, in_features), "weight": random_weight(fmt, in_features, out_features)}


def _dense(out_features: int, x: Tensor, weight: object) -> Tensor:
    """torch's linear with an unquantised weight of the same shape, in the dtype of the activations."""
    return F.linear(x, _copies(out_features, x.shape[1], x.dtype, x.device)())


@lru_cache(maxsize=1)
def _copies(out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """A function that returns one of several copies of a weight, so that no copy stays in the caches."""
    weight = numbers(out_features, in_features).to(device, dtype)
    copies = [weight.clone() for _ in range(min(32, max(1, 2**28 // weight.nbytes)))]

    def following() -> Tensor:
        copies.append(copies.pop(0))
        return copies[0]

    return following


def moe(shape: Shape, formats: Sequence[str], rows: Sequence[int], dtype: torch.dtype) -> Iterator[Work]:
    """The router and the experts of a mixture of experts. The reads of the chosen experts bound few tokens."""
    experts, hidden, inner = shape.experts, shape.hidden, shape.inner
    routing = ROUTING._replace(top_k=shape.top_k)
    for count in rows:
        logits = partial(_logits, count, experts, routing)
        label = f"{count} × {experts}, top {shape.top_k}"
        yield Work("moe.route", label, logits, 4.0 * count * (experts + 2 * shape.top_k), _route)
    for fmt, count in product(formats, rows):
        routed = route(**_logits(count, experts, routing))
        yield Work(
            "moe.experts",
            f"{fmt}, {count} × {experts} experts, top {shape.top_k}, {hidden} × {inner}",
            partial(_experts, dtype, fmt, routed, shape),
            FORMATS[fmt].bytes * 3 * hidden * inner * len(routed.experts.unique())
            + 2.0 * dtype.itemsize * count * hidden,
            _grouped,
            6.0 * count * shape.top_k * hidden * inner,
            FORMATS[fmt].kinds,
            ("weights",),
        )


def _logits(count: int, experts: int, routing: Routing) -> Arguments:
    return {"logits": torch.randn(count, experts), "routing": routing}


def _route(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    weights, experts = logits.softmax(-1).topk(routing.top_k)
    return experts, weights / weights.sum(-1, keepdim=True)


def _experts(dtype: torch.dtype, fmt: str, routed: Routed, shape: Shape) -> Arguments:
    gate_up = random_weight(fmt, shape.hidden, 2 * shape.experts * shape.inner)
    down = random_weight(fmt, shape.inner, shape.experts * shape.hidden)
    weights = ExpertWeights(FORMATS[fmt].op, gate_up, down, shape.experts, shape.inner, "silu_and_mul")
    return {"x": randn(dtype, len(routed.experts), shape.hidden), "routed": routed, "weights": weights}


def _grouped(x: Tensor, routed: Routed, weights: ExpertWeights) -> Tensor:
    """A stable sort and torch's grouped products, with unquantised weights of the same shape."""
    gate_up, down = _plain(weights.experts, weights.inner, x.shape[1], x.dtype, x.device)
    experts, order = routed.experts.flatten().sort(stable=True)
    ends = torch.searchsorted(experts, torch.arange(weights.experts, device=x.device), right=True).int()
    token = order // routed.experts.shape[1]
    gate, up = F.grouped_mm(x[token], gate_up, offs=ends).chunk(2, dim=-1)
    results = F.grouped_mm(F.silu(gate) * up, down, offs=ends) * routed.weights.flatten()[order, None].to(x.dtype)
    return torch.zeros_like(x).index_add_(0, token, results)


@lru_cache(maxsize=1)
def _plain(experts: int, inner: int, hidden: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    gate_up = numbers(experts * hidden, 2 * inner).to(device, dtype).view(experts, hidden, 2 * inner)
    return gate_up, numbers(experts * inner, hidden).to(device, dtype).view(experts, inner, hidden)


def attention(shape: Shape, dtype: torch.dtype) -> Iterator[Work]:
    """Decode of 1 and of 16 rows, prefill, and the last chunk of a long prefill."""
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    for rows, queries, context in ((1, 1, 1024), (1, 1, 8192), (16, 1, 1024), (1, 512, 512), (1, 128, 4096)):
        yield Work(
            "attention.paged",
            f"{rows} rows of {queries} after {context - queries}, {heads}/{kv_heads} heads of {dim}",
            partial(_paged, dtype, rows, queries, context, heads, kv_heads, dim),
            dtype.itemsize * dim * rows * (2 * kv_heads * context + 2 * heads * queries),
            _contiguous,
            4.0 * rows * heads * dim * _scores(queries, context),
        )


def latent(dtype: torch.dtype) -> Iterator[Work]:
    """Latent attention has many operations per byte, because all heads read the same keys."""
    heads, rotary, rank = LATENT
    dim = rotary + rank
    for rows, queries, context in ((1, 1, 1024), (8, 1, 1024), (1, 1, 8192), (1, 512, 512)):
        yield Work(
            "attention.latent",
            f"{rows} rows of {queries} after {context - queries}, {heads} heads of {rotary} + {rank}",
            partial(_latent, dtype, rows, queries, context, heads, rotary, dim),
            dtype.itemsize * rows * (dim * context + (dim + rank) * heads * queries),
            latent_attention,
            2.0 * rows * heads * (dim + rank) * _scores(queries, context),
        )


def _scores(queries: int, context: int) -> float:
    """The number of scores of a head in one row."""
    return queries * (context - queries) + queries * (queries + 1) / 2


def _latent(dtype: torch.dtype, rows: int, queries: int, context: int, heads: int, rotary: int, dim: int) -> Arguments:
    arguments = _paged(dtype, rows, queries, context, heads, 1, dim)
    arguments["rows"].groups(PAGE, 0)  # the reference computes them once for all layers of a step
    names = "query", "rows", "scale"
    return {"pages": arguments["key_pages"], "start": rotary, **{name: arguments[name] for name in names}}


def _paged(dtype: torch.dtype, rows: int, queries: int, context: int, heads: int, kv_heads: int, dim: int) -> Arguments:
    pages = -(-context // PAGE)
    table = (torch.randperm(rows * pages) + 1).to(torch.int32).view(rows, pages)
    cache = randn(dtype, 2, rows * pages + 1, PAGE, kv_heads, dim)
    starts = torch.arange(rows + 1, dtype=torch.int32) * queries
    contexts = torch.full((rows,), context, dtype=torch.int32)
    return {
        "query": randn(dtype, rows * queries, heads, dim),
        "key_pages": cache[0],
        "value_pages": cache[1],
        "rows": Rows(starts, contexts, table, (queries,) * rows, (context,) * rows),
        "scale": dim**-0.5,
    }


def _contiguous(query: Tensor, key_pages: Tensor, value_pages: Tensor, rows: Rows, scale: float) -> Tensor:
    """torch's attention, on contiguous keys and values instead of pages."""
    count, queries, context = len(rows.contexts), rows.query_lens[0], rows.contexts[0]
    by_row = query.view(count, queries, -1, query.shape[-1]).transpose(1, 2)
    keys, values = (pages[1:].reshape(count, -1, *pages.shape[2:])[:, :context] for pages in (key_pages, value_pages))
    mask = _mask(queries, context, query.device) if 1 < queries < context else None
    options = {"attn_mask": mask, "is_causal": 1 < queries == context, "scale": scale, "enable_gqa": True}
    return F.scaled_dot_product_attention(by_row, keys.transpose(1, 2), values.transpose(1, 2), **options)


@lru_cache(maxsize=1)
def _mask(queries: int, context: int, device: torch.device) -> Tensor:
    return torch.ones(queries, context, dtype=torch.bool, device=device).tril(context - queries)


def lora(shape: Shape, dtype: torch.dtype) -> Iterator[Work]:
    """Products of rows with up to 4 adapters. The bound is the time to read the factors of all adapters once."""
    for rows, out_features in product((1, 8, 64), (shape.hidden, shape.inner)):
        label = f"{rows} rows, {min(rows, ADAPTERS)} adapters"
        sizes = min(rows, ADAPTERS) * RANK * dtype.itemsize
        adapted = partial(_adapted, dtype, rows, out_features, shape.hidden)
        reads = float(sizes * (out_features + shape.hidden))
        yield Work("lora.add", f"{label}, {out_features} × {shape.hidden}", partial(_added, adapted), reads)
        if out_features == shape.hidden:
            yield Work("lora.embedding", label, partial(_embedded, adapted), float(sizes * shape.hidden))


def _adapted(dtype: torch.dtype, rows: int, out_features: int, in_features: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    ranks = (0, *[RANK] * min(rows, ADAPTERS))
    return {
        "out": randn(dtype, rows, out_features),
        "weights": random_weights(ranks, in_features, (out_features,), generator, dtype),
        "adapters": random_adapters([(1, 1 + row % ADAPTERS) for row in range(rows)], generator),
    }


def _added(adapted: partial[dict[str, Any]]) -> Arguments:
    dtype, rows, _, in_features = adapted.args
    return {"x": randn(dtype, rows, in_features), **adapted()}


def _embedded(adapted: partial[dict[str, Any]]) -> Arguments:
    _, rows, _, vocab = adapted.args
    return {"tokens": torch.randint(vocab, (rows,), dtype=torch.int32), **adapted()}


def elements(shape: Shape, dtype: torch.dtype) -> Iterator[Work]:
    """Ops for 1 token and for a prefill of 512. Their bound is the time to read the inputs; outputs may stay in the
    caches."""
    ops = Elements(shape, dtype)
    queries = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    # (op, numbers that it reads for each token, function that makes its arguments)
    cases: list[tuple[str, int, Callable[[int], Arguments]]] = [
        ("norm.rms", shape.hidden, ops.norm),
        ("norm.layer", shape.hidden, ops.layer_norm),
        ("norm.add_rms", 2 * shape.hidden, ops.add_norm),
        ("linear.embedding", shape.hidden, ops.embedding),
        ("activation.silu_and_mul", 2 * shape.inner, ops.gate),
        ("activation.gelu_and_mul", 2 * shape.inner, ops.gate),
        ("activation.gelu_tanh_and_mul", 2 * shape.inner, ops.gate),
        ("rope.neox", queries + keys + shape.head_dim, ops.rope),
        ("rope.interleaved", queries + keys + shape.head_dim, ops.rope),
        ("kv.store", 2 * keys, ops.store),
        ("kv.copy_pages", 2 * keys, ops.copies),
        ("kv.append", queries + 2 * keys + shape.head_dim, ops.append),
    ]
    for tokens, (op, values, make) in product((1, 512), cases):
        label = f"{tokens} token{'s' * (tokens > 1)}"
        yield Work(op, label, partial(make, tokens), dtype.itemsize * values * tokens)


@dataclass(frozen=True, slots=True)
class Elements:
    """Makes the arguments of element-wise ops for a number of tokens."""

    shape: Shape
    dtype: torch.dtype

    def norm(self, tokens: int) -> Arguments:
        return {"x": self._randn(tokens, self.shape.hidden), "weight": self._randn(self.shape.hidden), "eps": 1e-6}

    def add_norm(self, tokens: int) -> Arguments:
        return {**self.norm(tokens), "residual": self._randn(tokens, self.shape.hidden)}

    def layer_norm(self, tokens: int) -> Arguments:
        return {**self.norm(tokens), "bias": self._randn(self.shape.hidden)}

    def embedding(self, tokens: int) -> Arguments:
        weight = _table(self.shape.vocab, self.shape.hidden, self.dtype)
        return {"tokens": torch.randint(len(weight), (tokens,), dtype=torch.int32), "weight": weight}

    def gate(self, tokens: int) -> Arguments:
        return {"gate_up": self._randn(tokens, 2 * self.shape.inner)}

    def rotations(self, tokens: int) -> Arguments:
        angles = torch.rand(tokens, self.shape.head_dim // 2)
        return {"cos": angles.cos(), "sin": angles.sin()}

    def rope(self, tokens: int) -> Arguments:
        heads = {"query": self.shape.heads, "key": self.shape.kv_heads}
        return {name: self._heads(tokens, count) for name, count in heads.items()} | self.rotations(tokens)

    def pages(self, tokens: int) -> Arguments:
        keys, values = self._randn(2, tokens // PAGE + 2, PAGE, self.shape.kv_heads, self.shape.head_dim)
        return {"key_pages": keys, "value_pages": values, "slots": torch.arange(PAGE, PAGE + tokens)}

    def store(self, tokens: int) -> Arguments:
        heads = self.shape.kv_heads
        return {"key": self._heads(tokens, heads), "value": self._heads(tokens, heads), **self.pages(tokens)}

    def copies(self, tokens: int) -> Arguments:
        """As many pages as the tokens need are copied to other pages."""
        pages = max(1, tokens // PAGE)
        ids = torch.randperm(2 * pages)
        cache = self._randn(2, 2 * pages, PAGE, self.shape.kv_heads, self.shape.head_dim)
        return {"pages": cache, "sources": ids[:pages], "targets": ids[pages:]}

    def append(self, tokens: int) -> Arguments:
        norms = {"query_norm": self._randn(self.shape.head_dim), "key_norm": self._randn(self.shape.head_dim)}
        qkv = self._heads(tokens, self.shape.heads + 2 * self.shape.kv_heads)
        scalars = {"eps": 1e-6, "offset": 0.0, "rotation": "neox"}
        return {"qkv": qkv, **norms, **scalars, **self.rotations(tokens), **self.pages(tokens)}

    def _heads(self, tokens: int, heads: int) -> Tensor:
        return self._randn(tokens, heads, self.shape.head_dim)

    def _randn(self, *shape: int) -> Tensor:
        return randn(self.dtype, *shape)


@lru_cache(maxsize=1)
def _table(vocab: int, hidden: int, dtype: torch.dtype) -> Tensor:
    """The embedding table, which all arguments share: each reads other rows."""
    return torch.randn(vocab, hidden, dtype=dtype)


def sampling(vocab: int) -> Iterator[Work]:
    """Each op with 1 row and with 16 rows. The bound is the time to read the logits once."""
    cases: list[tuple[str, str, Callable[[int, int], Arguments]]] = [
        ("sampling.greedy", "", _greedy),
        ("sampling.draw", ", temperature", partial(_draw, vocab, 1.0)),
        ("sampling.draw", ", top_k 40", partial(_draw, 40, 1.0)),
        ("sampling.draw", ", top_p 0.9", partial(_draw, vocab, 0.9)),
        ("sampling.mask", "", _allowed),
        ("sampling.logprobs", "", _logprobs),
    ]
    for rows, (op, label, make) in product((1, 16), cases):
        yield Work(op, f"{rows} rows of {vocab}{label}", partial(make, rows=rows, vocab=vocab), 4.0 * rows * vocab)


def _greedy(rows: int, vocab: int) -> Arguments:
    return {"logits": torch.randn(rows, vocab) * 3.0}


def _draw(top_k: int, top_p: float, rows: int, vocab: int) -> Arguments:
    draws = Draws(
        temperature=torch.full((rows,), 0.8),
        seed_low=torch.arange(rows, dtype=torch.int32),
        seed_high=torch.arange(rows, dtype=torch.int32),
        position=torch.arange(rows, dtype=torch.int32),
        top_k=torch.full((rows,), top_k, dtype=torch.int32) if top_k < vocab else None,
        top_p=torch.full((rows,), top_p) if top_p < 1 else None,
        min_p=None,
        max_k=top_k,
    )
    return {**_greedy(rows, vocab), "draws": draws}


def _allowed(rows: int, vocab: int) -> Arguments:
    bits = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), dtype=torch.int32)
    return {**_greedy(rows, vocab), "rows": torch.arange(rows), "words": bits}


def _logprobs(rows: int, vocab: int) -> Arguments:
    return {**_greedy(rows, vocab), "tokens": torch.randint(vocab, (rows,)), "k": 0}


def families(
    shape: Shape, experts: Shape, formats: Sequence[str], rows: Sequence[int], dtype: torch.dtype
) -> dict[str, Iterator[Work]]:
    """The works of each family. `dtype`: that of activations."""
    return {
        "linear": linear(shape, formats, rows, dtype),
        "moe": moe(experts, formats, rows, dtype),
        "attention": attention(shape, dtype),
        "latent": latent(dtype),
        "elements": elements(shape, dtype),
        "lora": lora(shape, dtype),
        "sampling": sampling(shape.vocab),
    }


REFERENCES = dict(Ops())
