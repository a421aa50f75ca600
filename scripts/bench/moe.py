"""Mixtures of experts on this GPU: microseconds of router and experts of one layer, beside torch's grouped products.

`python scripts/bench/moe.py [--tokens 1,64] [FORMAT …]`. The layer has the sizes of Qwen3-30B-A3B. Each call in a graph
has its own choices of experts, so that the L2 cache does not have their weights. The bound is the time to read the
weights of the chosen experts, or the time of a dense bf16 product with as many operations if that is longer. The peer
is torch with bf16 weights: a stable sort, two grouped products, the gate and a weighted sum.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from cuda_linear import captured, microseconds, read_bandwidth, weight_of
from rows import Row, parser, row, save
from torch import Tensor
from torch.nn import functional as F

from localllm.backends.cuda.ops import OPS
from localllm.kernels.ops.linear import weight_tensors
from localllm.kernels.ops.moe import ExpertWeights, Routing

EXPERTS = 128
HIDDEN = 2048
INNER = 768
GROUP = 64
TOKENS = (1, 2, 4, 8, 16, 64, 256, 2048, 8192)
ROUTING = Routing(8, "softmax", True)
FORMATS = ("dense", "int8", "int4", "int4_wide", "fp8", "mxfp4")
ROUNDS = 7
LAYERS = 8  # calls of a graph, each with its own choices


def random_weights(op: str) -> ExpertWeights:
    gate_up = weight_of(op, EXPERTS * 2 * INNER, HIDDEN, GROUP)
    down = weight_of(op, EXPERTS * HIDDEN, INNER, GROUP)
    weights = ExpertWeights(op, gate_up, down, EXPERTS, INNER, "silu_and_mul")
    return OPS.moe.pack(weights, torch.bfloat16)


def torch_experts(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The layer in torch; the weights are [experts, outputs, inputs]."""
    shares, chosen = logits.softmax(-1).topk(ROUTING.top_k, dim=-1)
    shares = shares / shares.sum(-1, keepdim=True)
    experts, order = chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(experts, torch.arange(EXPERTS, device=x.device), right=True).int()
    token = order // ROUTING.top_k
    gates, ups = F.grouped_mm(x[token], gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    results = F.grouped_mm(F.silu(gates) * ups, down.transpose(1, 2), offs=ends)
    weighted = results * shares.flatten()[order, None]
    return torch.zeros_like(x, dtype=torch.float32).index_add_(0, token, weighted.float()).to(x.dtype)


def dense_time(tokens: int) -> float:
    """Microseconds of a dense bf16 product with as many operations as the experts of the tokens."""
    rows = tokens * ROUTING.top_k
    x = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(3 * INNER, HIDDEN, device="cuda", dtype=torch.bfloat16)
    graph = captured(lambda _: torch.mm(x, weight.t()), 2)
    return min(microseconds(graph, 2) for _ in range(ROUNDS))


def bound_of(tokens: int, choices: list[Tensor], bytes_of_expert: float, bandwidth: float) -> float:
    read = statistics.mean(len(chosen.unique()) for chosen in choices) * bytes_of_expert / bandwidth
    return max(read, dense_time(tokens) if tokens > 256 else 0.0)


def measure_tokens(op: str, tokens: int, weights: ExpertWeights, plain: tuple[Tensor, Tensor], bandwidth: float) -> Row:
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    logits = [torch.randn(tokens, EXPERTS, device="cuda") for _ in range(LAYERS)]

    def layer(index: int) -> Any:
        return OPS.moe.experts(x, OPS.moe.route(logits[index], ROUTING), weights)

    def peer(index: int) -> Any:
        return torch_experts(x, logits[index], *plain)

    calls: list[Callable[[int], Any]] = [layer, peer]
    graphs = [captured(partial(call), LAYERS) for call in calls]
    pairs = [[microseconds(graph, LAYERS) for graph in graphs] for _ in range(ROUNDS + 1)][1:]
    time, peer_time = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(other / own for own, other in pairs)
    size = sum(part.nbytes for weight in (weights.gate_up, weights.down) for part in weight_tensors(weight))
    choices = [OPS.moe.route(each, ROUTING).experts for each in logits]
    bound = bound_of(tokens, choices, size / EXPERTS, bandwidth)
    device = torch.cuda.get_device_name()
    title = f"moe.{op}, {EXPERTS} experts, {tokens} tokens"
    peer_time = round(peer_time, 2)
    return row(title, time, "µs", peer=peer_time, ratio=ratio, bound_share=bound / time, device=device, rounds=ROUNDS)


def measure(formats: list[str], counts: list[int]) -> Iterator[Row]:
    bandwidth = read_bandwidth()
    plain = (
        torch.randn(EXPERTS, 2 * INNER, HIDDEN, device="cuda", dtype=torch.bfloat16),
        torch.randn(EXPERTS, HIDDEN, INNER, device="cuda", dtype=torch.bfloat16),
    )
    for op in formats:
        weights = random_weights(op)
        for tokens in counts:
            yield measure_tokens(op, tokens, weights, plain, bandwidth)


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--tokens", help="numbers of tokens; default: all")
    arguments.add_argument("formats", nargs="*")
    options = arguments.parse_args()
    counts = [int(count) for count in options.tokens.split(",")] if options.tokens else list(TOKENS)
    save("moe", measure(options.formats or list(FORMATS), counts), part=bool(options.tokens or options.formats))
