"""What logits rounded to 16 bits cost: errors of log-probs of a bf16 model's sampled tokens.

    python tools/logit_precision.py [--device cuda] [--positions 256] [--vocab 32768] [--write]

Hidden states and weights are random bf16 numbers whose logits have a standard deviation of 4, like
those of a trained model. Labels are sampled from the distribution. Errors are against fp64 products
of the same bf16 numbers; the largest logit is printed. With `--write` the table goes into
docs/measured/logit_precision.md.

Shape suffixes: R positions, H hidden, V vocabulary.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megapack.model.logprobs import VocabHead, vocab_parallel_logprobs
from tools.pages.marks import table
from tools.pages.measured import versions, write

LOGIT_STD = 4.0


def measure(
    device: str, *, positions: int = 256, hidden: int = 1024, vocab: int = 32768
) -> tuple[dict[str, tuple[float, float]], float]:
    """Mean and largest absolute error in nats, by way of making logits; and the largest logit."""
    generator = torch.Generator().manual_seed(0)
    hidden_RH = torch.randn(positions, hidden, generator=generator)
    weight_VH = torch.randn(vocab, hidden, generator=generator) * (LOGIT_STD / hidden**0.5)
    hidden_RH = hidden_RH.to(device, torch.bfloat16)
    weight_VH = weight_VH.to(device, torch.bfloat16)
    exact_RV = hidden_RH.double() @ weight_VH.double().t()
    labels_R1 = torch.multinomial(exact_RV.softmax(1).cpu(), 1, generator=generator).to(device)

    def of_labels(logits_RV: Tensor) -> Tensor:
        return F.log_softmax(logits_RV, dim=1).gather(1, labels_R1)[:, 0]

    exact_R = of_labels(exact_RV)
    own_R, _ = vocab_parallel_logprobs(hidden_RH, labels_R1[:, 0], VocabHead(weight_VH=weight_VH))
    ways = {
        "fp32 (megapack's head)": own_R,
        "rounded to fp16": of_labels(exact_RV.half().float()),
        "rounded to bf16": of_labels(exact_RV.bfloat16().float()),
    }
    errors = {name: (logprobs_R.double() - exact_R).abs() for name, logprobs_R in ways.items()}
    found = {
        name: (error_R.mean().item(), error_R.max().item()) for name, error_R in errors.items()
    }
    return found, exact_RV.max().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--positions", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--write", action="store_true", help="write the file of docs/measured")
    options = vars(parser.parse_args())
    writes = options.pop("write")
    found, largest_logit = measure(**options)
    rows = [(name, f"{mean:.1e}", f"{largest:.1e}") for name, (mean, largest) in found.items()]
    lines = [
        f"{options['positions']} positions, vocabulary {options['vocab']}, hidden size "
        f"{options['hidden']}, largest logit {largest_logit:.1f}.",
        "",
        table(["logits", "mean error, nats", "largest, nats"], rows),
    ]
    print("\n".join(lines))
    if writes:
        title = "Log-probs from rounded logits"
        what = "Errors of log-probs of the sampled tokens of a bf16 model, against fp64."
        write("logit_precision", title, what, lines, f"{versions('torch')}, {options['device']}")


if __name__ == "__main__":
    main()
