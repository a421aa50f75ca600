"""The shape of guide, and the shape of the toy model of a smoke run."""

from __future__ import annotations

from transformers import Qwen3Config

CONTEXT = 2048
VOCAB = 6144


def guide_config(vocab: int = VOCAB) -> Qwen3Config:
    """About 15 M parameters. The embedding and the output head share their weights."""
    return Qwen3Config(
        vocab_size=vocab,
        hidden_size=384,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=1024,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        rope_theta=10000.0,
    )


def smoke_config(vocab: int) -> Qwen3Config:
    """Small enough to train in seconds on a CPU, and large enough that the loss falls."""
    return Qwen3Config(
        vocab_size=vocab,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=128,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        rope_theta=10000.0,
    )
