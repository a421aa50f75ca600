"""The causal decoders of transformers 5.23 that its code computes over our cache, and the others with the reason.

tests/backends/test_transformers_classes.py compares both lists with tiny models of all classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

RIGHT = frozenset(
    (
        "afmoe apertus arcee aria_text axk1 beam biogpt bitnet cohere cohere2 cohere2_moe ctrl cwm "
        "deepseek_v2 deepseek_v3 dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma gemma2 "
        "gemma3_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss granite "
        "granite_swa granitemoe granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 "
        "hyperclovax internlm3 iquestcoder jais2 kolibri1 laguna llama mellum minicpm3 minimax_m2 "
        "ministral ministral3 mistral mixtral modernbert-decoder moshi nanochat nemotron "
        "olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss "
        "smollm3 solar_open stablelm starcoder2 vaultgemma youtu"
    ).split()
)

_REASONS: Mapping[str, str] = MappingProxyType(
    {
        "its attention does not use the attention interface of transformers": (
            "big_bird bloom codegen cpmant doge falcon gpt_neo gpt_neox_japanese gptj megatron-bert mpt "
            "openai-gpt rembert roformer trocr xglm"
        ),
        "it is a multimodal model": (
            "blt dots3_note emu3 fuyu gemma3 gemma3n gemma4 gemma4_unified gemma4_unified_assistant git got_ocr2 "
            "llama4 mllama moss_transcribe_diarize phi4_multimodal qwen3_5 qwen3_5_moe qwen4_exp"
        ),
        "it is an encoder and a decoder": (
            "bart bigbird_pegasus blenderbot blenderbot-small marian mbart musicgen musicgen_melody mvp pegasus "
            "plbart prophetnet whisper"
        ),
        "its attention mask is neither causal nor a sliding window": (
            "bert bert-generation camembert data2vec-text electra ernie roberta roberta-prelayernorm roc_bert "
            "xlm-roberta xlm-roberta-xl"
        ),
        "it has layers of other kinds than full and sliding attention": (
            "axk2 bailing_hybrid deepseek_v32 deepseek_v4 falcon_h1 falcon_mamba glm_moe_dsa hy_v4 inkling2_text "
            "inkling_text jamba kimi_linear lfm3 llama4_text mamba minimax minimax_m3_vl_text nemotron_h olmo_hybrid "
            "qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp_text recurrent_gemma zamba zamba2 zaya"
        ),
        "its code reads values on the host, so its calls cannot be probed": ("jetmoe lfm2 longcat_flash xlm"),
        "its layers keep a state besides keys and values": ("rwkv xlstm"),
        "its attention module attends more than once in a step": ("diffllama hrm_text"),
        "its layers have keys of different shapes": ("mimo_v2_flash"),
        "its tiny model cannot be checked": (
            "bamba cohere_compass_text dbrx dots3_note_text gemma3n_text gemma4_assistant gemma4_text "
            "gemma4_unified_text granitemoehybrid lfm2_moe mamba2 reformer xlnet xmod"
        ),
    }
)

REFUSED: Mapping[str, str] = MappingProxyType(
    {model_type: reason for reason, names in _REASONS.items() for model_type in names.split()}
)
