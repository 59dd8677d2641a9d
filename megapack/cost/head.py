"""How many positions of a row the vocabulary head handles at one time."""

from __future__ import annotations

from megapack.cost.sizes import VOCAB_MULTIPLE
from megapack.layout import round_up

# Bytes of a chunk's fp32 logits on one GPU. 4,096 positions of 151,936 columns (Qwen3, tp1) take
# 2.3 GiB, a thirtieth of 80 GB. Fewer positions cost time: each chunk reads and writes the whole
# fp32 weight gradient, 8 bytes per element, for 2 operations per element and position. By its data
# sheet an H100 moves 3.35 TB/s and computes 989 TFLOP/s in bf16: 8 / 3.35e12 = 2 * n / 989e12 at
# n = 1,181 positions, so at 4,096 the memory takes 0.29 of the operations' time. Chosen by hand.
_LOGIT_BYTES = 5 * 2**29

# More positions gain little: at 8,192 the weight gradient's memory takes 0.14 of that time.
_MOST_TOKENS = 8192


def default_chunk_tokens(vocab_size: int, tp: int) -> int:
    """Positions of a chunk: a power of two of at most 8,192 whose logits fit into 2.5 GiB.

    It depends on sizes alone, so that the memory model, all ranks, and a forward pass and the step
    after it use the same number.

    Args:
        vocab_size: of the whole model, padded or not.
        tp: ranks that share the vocabulary.
    """
    columns = round_up(vocab_size, VOCAB_MULTIPLE) / tp
    fitting = max(1, int(_LOGIT_BYTES / (4 * columns)))
    return min(_MOST_TOKENS, 1 << (fitting.bit_length() - 1))
