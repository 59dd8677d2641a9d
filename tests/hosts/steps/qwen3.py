"""The toy of hosts that train a Hugging Face model under FSDP."""

from __future__ import annotations

from typing import Any


def qwen3_config(vocab_size: int, hidden: int, **more: Any) -> Any:
    """A Qwen3 of two layers; `more` goes to transformers' configuration."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        tie_word_embeddings=False,
        **more,
    )
