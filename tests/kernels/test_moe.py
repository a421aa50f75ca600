"""The references of mixtures of experts: the routers of transformers, plain loops, ties, and packing by expert."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen2_moe.configuration_qwen2_moe import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from localllm.kernels.ops import Ops
from localllm.kernels.ops.cases import CASES
from localllm.kernels.ops.cases.case import Case
from localllm.kernels.ops.linear import map_tensors
from localllm.kernels.ops.moe import ExpertWeights, Routed, Routing, experts, route

HIDDEN = 32
EXPERTS = 24
GROUPED = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "num_experts_per_tok": 5}

ROUTERS = {
    "qwen3": (Qwen3MoeTopKRouter, Qwen3MoeConfig(num_experts_per_tok=5), Routing(5, "softmax", False)),
    "qwen3-renormalised": (
        Qwen3MoeTopKRouter,
        Qwen3MoeConfig(num_experts_per_tok=5, norm_topk_prob=True),
        Routing(5, "softmax", True),
    ),
    "qwen2": (Qwen2MoeTopKRouter, Qwen2MoeConfig(num_experts_per_tok=3), Routing(3, "softmax", False)),
    "mixtral": (MixtralTopKRouter, MixtralConfig(num_experts_per_tok=2), Routing(2, "softmax", True)),
    "gpt-oss": (GptOssTopKRouter, GptOssConfig(num_experts_per_tok=4), Routing(4, "softmax", True)),
    "glm4": (
        Glm4MoeTopkRouter,
        Glm4MoeConfig(num_experts_per_tok=6, norm_topk_prob=True, routed_scaling_factor=1.5),
        Routing(6, "sigmoid", True, 1.5, group_score="top2"),
    ),
    "glm4-groups": (Glm4MoeTopkRouter, Glm4MoeConfig(**GROUPED), Routing(5, "sigmoid", True, 2.5, 4, 2, "top2")),
    "deepseek-v3": (DeepseekV3TopkRouter, DeepseekV3Config(**GROUPED), Routing(5, "sigmoid", True, 2.5, 4, 2, "top2")),
    "deepseek-v2": (
        DeepseekV2TopkRouter,
        DeepseekV2Config(topk_method="group_limited_greedy", **GROUPED),
        Routing(5, "softmax", False, 2.5, 4, 2),
    ),
    "deepseek-v2-greedy": (
        DeepseekV2TopkRouter,
        DeepseekV2Config(topk_method="greedy", **GROUPED),
        Routing(5, "softmax", False, 2.5),
    ),
}


@pytest.mark.parametrize("label", ROUTERS)
def test_route_equals_the_router_of_transformers(label: str) -> None:
    kind, config, routing = ROUTERS[label]
    config.hidden_size = HIDDEN
    config.num_local_experts = EXPERTS
    config.num_experts = EXPERTS
    router: Any = kind(config)
    generator = torch.Generator().manual_seed(3)
    for tensor in (*router.parameters(), *router.buffers()):
        tensor.data = torch.randn(tensor.shape, generator=generator) * 0.3
    x = torch.randn(40, HIDDEN, generator=generator)
    with torch.inference_mode():
        logits, *weights_and_experts = router(x)
        weights, chosen = weights_and_experts[-2:]
    routed = route(logits, routing, dict(router.named_buffers()).get("e_score_correction_bias"))
    assert routed.experts.dtype == torch.int32
    assert torch.equal(routed.experts.long().sort(1).values, chosen.sort(1).values)
    by_expert = torch.zeros(40, EXPERTS).scatter(1, chosen, weights)
    torch.testing.assert_close(torch.zeros(40, EXPERTS).scatter(1, routed.experts.long(), routed.weights), by_expert)


def test_equal_scores_choose_the_smaller_index() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0], [0.0] * 5])
    assert route(logits, Routing(4, "softmax", True)).experts.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]
    grouped = Routing(2, "sigmoid", True, groups=4, top_groups=2, group_score="top2")
    assert route(torch.zeros(1, 8), grouped).experts.tolist() == [[0, 1]]
    assert route(torch.tensor([[0.0, 1, 0, 1, 1, 0, 0, 0]]), grouped).experts.tolist() == [[1, 3]]


def test_correction_changes_the_choice_and_not_the_weights() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    routed = route(logits, Routing(2, "sigmoid", False), torch.tensor([9.0, 0.0, 0.0]))
    assert routed.experts.tolist() == [[0, 2]]
    torch.testing.assert_close(routed.weights, logits.sigmoid()[:, [0, 2]])


def test_weights_of_zero_stay_zero() -> None:
    routed = route(torch.full((1, 4), -200.0), Routing(2, "sigmoid", True))
    assert routed.weights.tolist() == [[0.0, 0.0]]


def plain_loop(x: torch.Tensor, routed: Routed, weights: ExpertWeights) -> torch.Tensor:
    """Each token and each of its experts by itself, in float64."""
    ops = Ops()
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for expert, share in zip(routed.experts[token].tolist(), routed.weights[token].double(), strict=True):
            result = row[None]
            for weight, bias, size in (
                (weights.gate_up, weights.gate_up_bias, 2 * weights.inner),
                (weights.down, weights.down_bias, x.shape[1]),
            ):
                rows = slice(expert * size, (expert + 1) * size)
                expert_weight = map_tensors(weight, lambda tensor, rows=rows: tensor[rows])
                shift = None if bias is None else bias[expert].double()
                result = getattr(ops.linear, weights.op)(result, expert_weight, shift, torch.float64)
                if weight is weights.gate_up:
                    result = getattr(ops.activation, weights.gate)(result)
            out[token] += share * result[0]
    return out


@pytest.mark.parametrize("case", [case for case in CASES if case.op == "moe.experts"], ids=str)
def test_experts_equals_a_plain_loop(case: Case) -> None:
    arguments = case.make(torch.Generator().manual_seed(4), torch.float32)
    wide = arguments["x"].double()
    result = experts(wide, arguments["routed"], arguments["weights"])
    torch.testing.assert_close(result, plain_loop(**arguments), rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", [case for case in CASES if case.op == "moe.experts"], ids=str)
def test_packing_expert_by_expert_keeps_the_weights(case: Case) -> None:
    weights = case.make(torch.Generator().manual_seed(4), torch.float32)["weights"]
    packed = Ops().moe.pack(weights, torch.float32)
    for one, other in ((packed.gate_up, weights.gate_up), (packed.down, weights.down)):
        pairs = [one, other] if isinstance(one, torch.Tensor) else [tuple(one), tuple(other)]
        torch.testing.assert_close(*pairs, rtol=0, atol=0)
