"""The tokenizer class that transformers chooses for a model folder. Some classes replace parts of tokenizer.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ....engine.errors import ModelRefused
from .files import SideFiles

AS_STORED = "TokenizersBackend"  # the class that uses tokenizer.json as it is

# Class -> values of `model_type` in config.json for which transformers registers it.
_MODELS = {
    AS_STORED: "EvollaModel aria beam bigbird_pegasus canary flex_olmo glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe "
    "glm_image glmasr got_ocr2 gpt_bigcode gradium_phonon_tts granite granitemoe granitemoehybrid granitemoeshared "
    "kimi_k25 kimi_linear kosmos-2 mimo_v2_flash minicpm_ocr minicpmv4_6 minicpmv4_7 ministral ministral3 mistral "
    "mistral3 mistral_large4 mixtral nemo_speechlm nystromformer olmo2 olmo3 olmo_hybrid pegasus_x persimmon "
    "pix2struct pixtral pocket_tts stablelm umt5 voxtral voxtral_realtime xlm-roberta-xl",
    "LlamaTokenizer": "idefics idefics2",
    "GPT2Tokenizer": "blip-2 codegen dbrx emu3 gpt2 gpt_neo gptj hyperclovax_vision_v2 instructblip instructblipvideo "
    "jais2 opt phi starcoder2",
    "GPTNeoXTokenizer": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm",
    "Qwen2Tokenizer": "audioflamingo3 colqwen2 cosmos3_omni dots3_note fun_asr_nano hunyuan_vl internvl lighton_ocr "
    "moss_transcribe_diarize ovis2 qianfan_ocr qwen2 qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl qwen3 "
    "qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe vibevoice",
    "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen4_exp",
    "GemmaTokenizer": "diffusion_gemma gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma "
    "shieldgemma2 t5gemma zaya",
    "CohereTokenizer": "aya_vision cohere cohere2",
}
# Models whose files often name a wrong class, so that transformers uses the registered one, or AS_STORED.
_DISTRUSTED = frozenset(
    "arctic camembertv2-base chatlm cohere_asr ernie4_5 ernie4_5_moe fuyu h2ovl_chat hyperclovax hyperclovax_vision_v2 "
    "hyperclovax_vlm internlm2 internlm3 iquestcoder jamba llava llava_next minicpm3 minicpmv minimax_m2 modernbert "
    "modernbert-decoder molmo molmo2 nemotron nvfp4 opencua openvla paddleocr_vl phi3 phi3_v phimoe qwen2 qwen3_5 "
    "qwen3_5_moe qwen3_5_moe_text qwen4_exp siglip2 smolvlm step3_vl vipllava".split()
)
# A model without a registered class uses tokenizer.json as it is, if its files are distrusted.
_REGISTERED = dict.fromkeys(_DISTRUSTED, AS_STORED) | {
    model: name for name, models in _MODELS.items() for model in models.split()
}
BUILT = frozenset({*_MODELS, "CodeGenTokenizer", "CodeLlamaTokenizer"}) - {AS_STORED}  # those in pipelines.py
# Other classes in transformers that build a tokenizer of their own, or are no tokenizer of this library.
_FOREIGN = frozenset(
    f"{name}Tokenizer"
    for name in "Albert Auto Bart Barthez Bartpho Basic BertGeneration BertJapanese Bert Bertweet BigBird BioGpt "
    "BlenderbotSmall Blenderbot ByT5 CLIP CTRL Camembert Canine Character Clvp ConvBert CpmAnt Cpm DPRContextEncoder "
    "DPRQuestionEncoder DPRReader Deberta DebertaV2 Dia DistilBert Electra Esm Esmc FNet FSMT FastSpeech2Conformer "
    "Flaubert Funnel GPTNeoXJapanese GPTSw3 Herbert LED Lasr LayoutLM LayoutLMv2 LayoutLMv3 LayoutXLM Longformer Luke "
    "Lxmert M2M100 MBart50 MBart MLuke MPNet Marian MarkupLM Mecab Mgpstr MobileBert Mvp MyT5 Nllb Nougat OpenAIGPT "
    "PLBart Parakeet Pegasus Perceiver Phobert Pop2Piano ProphetNet Rag Reformer RemBert RoCBert RoFormer Roberta "
    "SeamlessM4T Siglip2 Siglip Speech2Text SpeechT5 Splinter SqueezeBert T5 Tapas Tipsv2 Udop VideoPrism Vits "
    "Wav2Vec2CTC Wav2Vec2PhonemeCTC Whisper Wordpiece XGLM XLMRoberta XLM XLNet".split()
) | {"MistralCommonBackend", "SentencePieceBackend"}


def class_of(config: Mapping[str, Any], model: Mapping[str, Any], is_byte_level: Callable[[], bool]) -> str:
    """The class: AS_STORED, or one of BUILT. Raises ModelRefused for any other that transformers would use.

    `config`: tokenizer_config.json. `model`: config.json. `is_byte_level`: whether tokenizer.json names ByteLevel.
    """
    kind, kept = str(model.get("model_type")), str(model.get("model_name"))
    registered = _REGISTERED.get(kind, "")
    distrusted = not _DISTRUSTED.isdisjoint((kind, kept))
    name = _stem(config) or _stem(model)
    if _has_code(config):
        return _supported(_without_code(name, registered, distrusted=distrusted))
    if registered == AS_STORED:
        return AS_STORED
    if name == "LlamaTokenizer" and not distrusted and is_byte_level():
        return AS_STORED  # the class is for sentencepiece vocabularies
    return _supported(registered if registered and distrusted else name or registered or AS_STORED)


def check_class(folder: Path) -> None:
    """Raises ModelRefused if transformers uses a class for the tokenizer of a model folder that localllm lacks."""
    files = SideFiles(folder)
    class_of(files.config, files.model, lambda: names_byte_level(folder))


def names_byte_level(folder: Path) -> bool:
    """Whether tokenizer.json names ByteLevel."""
    path = folder / "tokenizer.json"
    return path.exists() and b'"ByteLevel"' in path.read_bytes()


def _has_code(config: Mapping[str, Any]) -> bool:
    """Whether the repository has its own code for the tokenizer."""
    code = config.get("auto_map")
    return bool(code.get("AutoTokenizer") if isinstance(code, dict) else code)


def _without_code(name: str, registered: str, *, distrusted: bool) -> str:
    """The class in transformers that replaces the code of the repository."""
    if not (registered or distrusted or name in BUILT | _FOREIGN or _is_stored(name)):
        raise ModelRefused(
            f"tokenizer_config.json: auto_map names code of the repository as tokenizer {name or 'class'}",
            hint="localllm runs no code of a model; use a repository whose tokenizer_class is in transformers",
        )
    return name or registered or AS_STORED


def _supported(name: str) -> str:
    if name in _FOREIGN:
        raise ModelRefused(
            f"tokenizer_class {name}: transformers builds this tokenizer from its class, not from tokenizer.json",
            hint="if tokenizer.json is the right tokenizer, set tokenizer_class to TokenizersBackend",
        )
    return name if name in BUILT else AS_STORED


def _stem(config: Mapping[str, Any]) -> str:
    name = config.get("tokenizer_class") or ""
    if not isinstance(name, str):
        raise ModelRefused("tokenizer_config.json: tokenizer_class must be a string")
    return name.removesuffix("Fast")


def _is_stored(name: str) -> bool:
    """Whether transformers has a class of this name that uses tokenizer.json as it is."""
    return name in {AS_STORED, "PreTrainedTokenizer", "PythonBackend", "BloomTokenizer"}
