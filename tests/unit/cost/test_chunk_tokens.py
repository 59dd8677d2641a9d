"""The number of positions that the vocabulary head handles at one time."""

from __future__ import annotations

import pytest

from megapack.cost.head import default_chunk_tokens

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("vocab_size", "tp", "tokens"),
    [
        (151_936, 1, 4096),  # Qwen3: 2.3 GiB of fp32 logits
        (151_936, 2, 8192),
        (128_256, 1, 4096),  # Llama 3: 2.0 GiB
        (262_144, 1, 2048),  # Gemma 3: 2.0 GiB
        (384, 1, 8192),
    ],
)
def test_chunks_of_known_vocabularies(vocab_size: int, tp: int, tokens: int) -> None:
    assert default_chunk_tokens(vocab_size, tp) == tokens


def test_logits_fit_into_the_limit_and_twice_as_many_do_not() -> None:
    limit = 2.5 * 2**30
    for vocab_size in range(100_000, 300_000, 9_973):
        tokens = default_chunk_tokens(vocab_size, 1)
        assert 4 * tokens * vocab_size <= limit < 4 * 2 * tokens * (vocab_size + 128)


def test_a_padded_vocabulary_has_the_same_chunk() -> None:
    # The head sees Megatron's padded matrix, the memory model the size before padding.
    for vocab_size in (259, 50_257, 163_800, 163_841):
        padded = -(-vocab_size // 128) * 128
        for tp in (1, 2, 4, 8):
            assert default_chunk_tokens(vocab_size, tp) == default_chunk_tokens(padded, tp)


def test_any_vocabulary_has_a_chunk() -> None:
    assert default_chunk_tokens(10**10, 1) == 1
