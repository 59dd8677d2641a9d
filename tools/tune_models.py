"""Print which layouts published models fit on, by `megapack tune`, as the table of docs/models.md.

    python tools/tune_models.py [--models GLOB] [--gpus 8,64,512]

A cell has the fastest of the layouts with the least model parallelism that fit, the memory of its
fullest GPU and tokens per second and GPU. Layouts are tried in the order of tp * pp, and of those
that fit, the first few are compared. What was refused is on stderr.

The configs are those of `tests/unit/job/config/published_configs.py` and `hybrid_configs.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import io
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megapack import cli  # noqa: E402
from megapack.cost.memory import GIB  # noqa: E402
from megapack.job.config.model import ModelConfig  # noqa: E402
from tests.unit.job.config.hybrid_configs import HYBRID  # noqa: E402
from tests.unit.job.config.published_configs import CONFIGS  # noqa: E402
from tools.model_sizes import HYBRID_NAMES  # noqa: E402

MODELS = CONFIGS | {name: HYBRID[key] for key, name in HYBRID_NAMES.items()}
LONGEST = 16384
# Layouts that fit and are compared.
COMPARED = 3
SIZES = (1, 2, 4, 8)
EXPERT_RANKS = (8, 16, 32, 64)
OPTIONS = (
    *("--recompute", "full", "--search", "16", "--peak-tflops", "989", "--vpp", "1"),
    *("--context-parallel", "fixed", "--backward", "joint", "--split-samples", "off"),
    *("--max-tokens-per-gpu", "16384,32768"),
)
CONFIG = """\
name: tuned
model: {{hf_path: {folder}, dtype: bf16}}
data: {{num_generated: 16}}
plan: {{max_tokens_per_gpu: 16384}}
optim: {{lr: 1.0e-6, distributed_optimizer: true}}
objective: {{kind: sft}}
"""


def write_lengths(path: Path, count: int) -> float:
    """Lognormal lengths; returns their mean."""
    drawn = np.random.default_rng(0).lognormal(np.log(2100), 0.8, count)
    lengths = np.clip(drawn, 16, LONGEST).astype(int)
    path.write_text("length\n" + "\n".join(map(str, lengths)) + "\n", encoding="utf-8")
    return float(lengths.mean())


def tuned(*argv: str) -> dict[str, Any] | str:
    """What `megapack tune` prints as JSON, or its error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(["tune", *argv, *OPTIONS, "--top", "1", "--json"])
    return json.loads(out.getvalue()) if code in (0, 1) else err.getvalue().strip()


def cell(config: Path, lengths: Path, gpus: int, batch: int, num_experts: int | None) -> str:
    """The best layout, or the least memory."""
    found: list[dict[str, Any]] = []
    least: tuple[float, str] | None = None
    layouts = sorted(
        itertools.product(SIZES, SIZES), key=lambda sizes: (sizes[0] * sizes[1], sizes)
    )
    for tp, pp in layouts:
        ranks = gpus // (tp * pp)
        for ep in _expert_ranks(num_experts, ranks * tp):
            if ranks == 0 or len(found) == COMPARED:
                continue
            name = _layout(ranks, tp, pp, ep)
            sizes = ("--tp", str(tp), "--pp", str(pp), "--ep", str(ep), "--uneven")
            common = (str(lengths), "--config", str(config), "--gpus", str(gpus))
            result = tuned(*common, "--global-batch-size", str(batch), *sizes)
            if isinstance(result, str):
                print(f"{name}: {result}", file=sys.stderr)
                continue
            gib = result["least_memory_bytes"] / GIB
            if result["ranked"]:
                found.append({**result["ranked"][0], "name": name})
            elif least is None or gib < least[0]:
                least = gib, name
    if found:
        best = max(found, key=lambda one: one["tokens_per_gpu_second"])
        memory = best["memory_bytes"]["total"] / GIB
        return f"{best['name']}: {memory:.0f} GiB, {best['tokens_per_gpu_second']:,.0f}"
    return "no layout" if least is None else f"does not fit: {least[0]:.0f} GiB at {least[1]}"


def _expert_ranks(num_experts: int | None, most: int) -> list[int]:
    """Sizes of ep that divide the experts: those of `EXPERT_RANKS`, or the largest below them."""
    if num_experts is None:
        return [1]
    sizes = [ep for ep in (1, 2, 4, *EXPERT_RANKS) if num_experts % ep == 0 and ep <= most]
    return [ep for ep in sizes if ep in EXPERT_RANKS] or sizes[-1:]


def _layout(dp: int, tp: int, pp: int, ep: int) -> str:
    sizes = {"dp": dp, "tp": tp, "pp": pp, "ep": ep}
    return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="*", help="glob of names")
    parser.add_argument("--gpus", default="8,64,512", help="numbers of GPUs")
    options = parser.parse_args()
    counts = [int(count) for count in options.gpus.split(",")]
    print("| model | " + " | ".join(f"{count} GPUs" for count in counts) + " |")
    print("|---" * (1 + len(counts)) + "|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        batches = {count: 4096 if count > 64 else 512 for count in counts}
        for batch in set(batches.values()):
            mean = write_lengths(folder / f"{batch}.csv", batch)
            print(f"{batch} lengths, mean {mean:,.0f}", file=sys.stderr)
        for model in sorted(fnmatch.filter(MODELS, options.models)):
            config = folder / "config.json"
            config.write_text(json.dumps(MODELS[model]), encoding="utf-8")
            (folder / "tuned.yaml").write_text(CONFIG.format(folder=folder), encoding="utf-8")
            num_experts = ModelConfig.from_hf(name).num_experts
            cells = [
                cell(
                    folder / "tuned.yaml",
                    folder / f"{batches[count]}.csv",
                    count,
                    batches[count],
                    num_experts,
                )
                for count in counts
            ]
            print(f"| {model} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
