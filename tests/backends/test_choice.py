"""Third-party attention: used if the device offers it, refused by name otherwise, never part of a full graph."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from localllm.backends import cpu
from localllm.backends.cpu.device import DEVICE as CPU
from localllm.backends.pytorch.choice import with_attention, with_lora_backend
from localllm.backends.pytorch.device import Device
from localllm.backends.pytorch.graphs.runner import GraphRunner
from localllm.backends.pytorch.opening import open_runner
from localllm.backends.pytorch.runner import TorchRunner
from localllm.engine.errors import SettingRefused
from localllm.engine.files.model_files import read_model
from localllm.engine.options import LoadOptions
from localllm.kernels.ops import Ops
from localllm.kernels.ops.attention import Attention
from localllm.kernels.ops.lora import Lora

from . import canary
from .conformance import BUDGET, Conversation
from .tape import Tape

CALLS: list[tuple[int, ...]] = []


def theirs(device: Device) -> Device:
    ops = device.ops

    def paged(query: Any, rows: Any, *others: Any) -> Any:
        assert rows.exact, "it plans from the host's numbers"
        CALLS.append(rows.contexts)
        return ops.attention.paged(query, rows, *others)

    return replace(device, ops=replace(ops, attention=Attention(paged=paged)), captures_attention=False)


TAPED = replace(CPU, ops=Ops(), recorder=Tape, graphs="breakable", attentions=MappingProxyType({"flashinfer": theirs}))
CHOSEN = replace(BUDGET, attention="flashinfer")


def test_built_in_attention_is_the_default() -> None:
    for name in ("auto", "ours"):
        assert with_attention(TAPED, LoadOptions(attention=name)) is TAPED


def test_device_without_the_attention_refuses_by_name(tmp_path: Path) -> None:
    with pytest.raises(SettingRefused, match="attention flashinfer is not supported on cpu") as refused:
        cpu.open(read_model(canary.save(tmp_path)), CHOSEN)
    assert "auto" in refused.value.hint


@pytest.mark.parametrize("option", [{"weight_layout": "plain"}, {"prefetch": "on"}])
def test_options_of_few_devices_are_refused_by_the_others(tmp_path: Path, option: Any) -> None:
    (name,) = option
    files = read_model(canary.save(tmp_path))
    with pytest.raises(SettingRefused, match=f"{name} .* is not supported by cpu"):
        open_runner(files, replace(BUDGET, **option), CPU, 2**30)
    assert open_runner(files, replace(BUDGET, **option), replace(CPU, options=frozenset([name])), 2**30)


def test_full_graphs_are_refused() -> None:
    with pytest.raises(SettingRefused, match="graphs = full") as refused:
        with_attention(TAPED, replace(CHOSEN, graphs="full"))
    assert "breakable" in refused.value.hint


@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_third_party_attention_gives_known_tokens(tmp_path: Path, graphs: Any) -> None:
    runner = open_runner(read_model(canary.save(tmp_path)), replace(CHOSEN, graphs=graphs), TAPED, 2**30)
    assert runner.spec.graph_rows == ()
    assert bool(runner.spec.graph_tokens) == (graphs == "auto")
    assert isinstance(runner, GraphRunner if graphs == "auto" else TorchRunner)
    CALLS.clear()
    talk = Conversation(runner)
    prompts = {f"r{key}": canary.prompt(key, 25 + key, seed=key) for key in range(3)}
    for name, prompt in prompts.items():
        talk.submit(name, prompt, 12)
    assert talk.finish() == {name: canary.walk(prompt, 12) for name, prompt in prompts.items()}
    assert len(CALLS) >= 12
    assert any(len(contexts) == 3 for contexts in CALLS), "decode steps too"


def test_lora_backends() -> None:
    tiled = Lora(add=lambda *_: None)
    compiled = Lora(embedding=lambda *_: None)
    backends = {"torch_native": Lora(), "triton": tiled, "csgmv": tiled, "cpp": compiled}
    device = replace(CPU, ops=replace(CPU.ops, lora=compiled), lora_backends=backends)
    assert with_lora_backend(device, LoadOptions()) is device
    for name, lora in backends.items():
        chosen = with_lora_backend(device, LoadOptions(lora_backend=name))
        assert chosen.ops.lora is lora or name == "torch_native"
        assert chosen.ops.lora == lora
        assert chosen.joins_requests == (name != "triton")


def test_lora_backends_of_the_cpu() -> None:
    assert dict(CPU.lora_backends) == {"torch_native": Lora(), "cpp": CPU.ops.lora}
    assert with_lora_backend(CPU, LoadOptions(lora_backend="cpp")).ops == CPU.ops


def test_device_without_the_lora_backend_refuses_by_name(tmp_path: Path) -> None:
    with pytest.raises(SettingRefused, match="lora_backend csgmv is not supported on cpu") as refused:
        cpu.open(read_model(canary.save(tmp_path)), LoadOptions(lora_backend="csgmv"))
    assert refused.value.hint == "set it to one of auto, cpp, torch_native"


def test_cuda_offers_flashinfer_if_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.backends.cuda.device import DEVICE

    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(SettingRefused, match="not installed") as refused:
        DEVICE.attentions["flashinfer"](DEVICE)
    assert "localllm[flashinfer]" in refused.value.hint
