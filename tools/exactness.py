"""Compare every layout and feature with one unpadded sample at a time; writes docs/measured.

    python tools/exactness.py [--cases PATTERN] [--models PATTERN] [--prefixes PATTERN]
        [--dynamic-cp PATTERN] [--split-samples PATTERN] [--hybrid PATTERN]
        [--vision PATTERN] [--streams PATTERN] [--executor operations]
    python tools/exactness.py --attention te [--te 2.11.0] [the same patterns]

Runs the reference and then each case of `tests/dist/exactness/cases.py` on 1, 2, 4 and 8 processes
over gloo; models of Hugging Face folders, the cases of `tests/dist/hf/hf_cases.py`, beside
transformers; and rows with shared prefixes, samples in pieces, and rows over several data-parallel
ranks, the cases of `tests/dist/rows/prefix_cases.py`, `split_cases.py` and `wide_cases.py`. With
some of the patterns, only those. Hybrid models, their folders too, run only with their pattern, on
Megatron-Core 0.18 or later.

Models with hyper-connections run only with `--streams`, on Megatron-LM's main or dev branch first
on PYTHONPATH.

Models with images, the cases of `tests/dist/vision/vision_cases.py` beside transformers, run only
with `--vision`; its mutations, which must be seen, are tests (`-m weekly`).

Each kind has a file of `tools/pages/exactness_files.py`. A pattern other than '*' leaves the file
as it is and prints its table only.

With `--executor operations` nothing is written. Cases of `tests/dist/exactness/cases.py` and
`tests/dist/schedule/overlap_worker.py` run in Megatron's schedules and as lists of their
operations, which are compared bit for bit; the exit code is 1 if one differs. All other cases run
as lists.

With `--attention te` all cases run over Transformer Engine's layers on stand-ins of their kernels
(docs/cpu.md), against the same references without it; the file has the largest errors.
`tools/te_python.sh` brings the release that `--te` names.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.toy import FEW_LAYERS_VARIABLE  # noqa: E402

# Tests run most cases through 4 layers. `tests.dist.problem` reads it when it is imported.
os.environ.setdefault(FEW_LAYERS_VARIABLE, "8")

from megatron.core import __version__ as megatron_version  # noqa: E402

from megapack.base.choices import Executor  # noqa: E402
from megapack.layout import Layout  # noqa: E402
from tests import te_python  # noqa: E402
from tests.dist import problem  # noqa: E402
from tests.dist.exactness.cases import (  # noqa: E402
    ALL_CASES,
    EVERY_CASE,
    HYBRID_CASES,
    STREAMS_CASES,
    Case,
)
from tests.dist.exactness.te_cases import APART, GRIDS, refusal  # noqa: E402
from tests.dist.executor import VARIABLE, executor  # noqa: E402
from tests.dist.hf.hf_cases import ALL_FAMILIES, HF_CASES, run_hf_cases, runnable  # noqa: E402
from tests.dist.rows.row_case import RowCase  # noqa: E402
from tests.dist.rows.row_cases import ALL_CASES as ROW_CASES  # noqa: E402
from tests.dist.rows.row_cases import GROUPS as ROW_GROUPS  # noqa: E402
from tests.dist.rows.row_cases import run_row_cases  # noqa: E402
from tests.dist.rows.row_problem import MODELS as ROW_MODELS  # noqa: E402
from tests.dist.rows.row_problem import PRECISE as ROW_PRECISE  # noqa: E402
from tests.dist.rows.row_problem import TAUGHT  # noqa: E402
from tests.dist.run_cases import run_cases  # noqa: E402
from tests.dist.schedule.operations_worker import OVERLAP, OVERLAP_CASES  # noqa: E402
from tests.dist.spawn import checked_job  # noqa: E402
from tests.dist.vision.vision_cases import CASES as VISION_CASES  # noqa: E402
from tests.dist.vision.vision_cases import run_vision_cases  # noqa: E402
from tests.dist.vision.vision_cases import runnable as runnable_vision  # noqa: E402
from tools.pages.exactness_files import is_whole, publish  # noqa: E402
from tools.pages.measured import versions  # noqa: E402

MODELS = {
    "llama": "Llama",
    "mistral": "Mistral: heads wider than hidden size / heads",
    "mistral_window": "Mistral: a sliding window in all layers",
    "llama3_rope": "Llama 3.1: rope scaling",
    "qwen2": "Qwen2: biases of queries, keys and values",
    "qwen2_window": "Qwen2: a sliding window in the last layers",
    "qwen3": "Qwen3: norms of queries and keys",
    "qwen3_tied": "Qwen3, tied",
    "qwen2_moe": "Qwen2-MoE: gated shared expert",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3-MoE",
    "deepseek_v32": "DeepSeek-V3.2: sparse attention over 8 tokens",
    "glm_moe_dsa": "GLM-5: sparse attention over 8 tokens, neighbours rotated",
    "deepseek_v3": "DeepSeek-V3: MLA, yarn, first layer dense, shared experts, groups, expert bias",
    "glm4_moe": "GLM-4.5: half of a head rotated, biases, first layer dense, shared expert",
    "moonlight": "Moonlight: MLA without compressed queries, norms of two epsilons",
    "deepseek_v2": "DeepSeek-V2-Lite: MLA, yarn, softmax scores as they are",
    "deepseek_v2_groups": "DeepSeek-V2: groups of experts by their best one",
    "glm4_moe_lite": "GLM-4.7-Flash: MLA, norms of two epsilons",
    "glm4": "GLM-4: norms before and after, neighbouring channels of half a head rotated",
    "minimax_m2": "MiniMax-M2: norms over all heads, half of a head rotated, expert bias",
    "seed_oss": "Seed-OSS",
    "ernie4_5": "Ernie-4.5: neighbouring channels rotated, tied",
    "ernie4_5_moe": "Ernie-4.5-MoE: softmax scores, chosen with a bias, shared experts",
    "hunyuan_v1_dense": "Hunyuan: norms of queries and keys after their rotation, NTK",
    "hunyuan_v1_moe": "Hunyuan-MoE: as Hunyuan; a shared expert",
    "gpt_oss": "gpt-oss: windows, sinks, biases, clamped experts, yarn",
    "mimo": "MiMo",
    "qwen3_yarn": "Qwen3: yarn",
    "olmo2": "OLMo-2: norms after attention and MLP, norms over all heads",
    "olmo3": "OLMo-3: as OLMo-2; yarn in global layers only",
    "phi3": "Phi-4-mini: longrope, half of a head rotated, stacked projections",
    "gemma2": "Gemma 2: capped scores and logits, windows, four norms per layer, tied",
    "gemma3_text": "Gemma 3: four norms per layer, two rotary embeddings, scaled embeddings, tied",
    "gemma4_text": "Gemma 4: wider global heads whose keys are values, layer scalars, tied",
    "gemma4_experts": "Gemma 4 with experts: as before, experts beside an MLP",
    "qwen2_5_vl": "Qwen2.5-VL: the text part",
    "qwen3_vl": "Qwen3-VL: the text part, tied",
    "qwen3_vl_moe": "Qwen3-VL-MoE: the text part, stacked experts",
    "mimo_mtp": "MiMo with multi-token prediction",
    "glm4_moe_lite_mtp": "GLM-4.7-Flash with multi-token prediction",
    "qwen3_next_mtp": "Qwen3-Next with multi-token prediction",
    "qwen3_next": "Qwen3-Next: gated delta nets, gated attention, experts",
    "qwen3_5": "Qwen3.5: the text part, tied",
    "qwen3_5_moe": "Qwen3.5-MoE: the text part, stacked experts",
    "nemotron_h": "Nemotron-3: Mamba-2, attention without positions, experts",
    "nemotron_super": "Nemotron-3 Super: as before, experts at a latent width",
    "nemotron_super_mtp": "Nemotron-3 Super with multi-token prediction",
    "qwen3_tied_hybrid": "Qwen3, tied, in a HybridModel",
    "qwen2_moe_hybrid": "Qwen2-MoE in a HybridModel",
}
MODEL_LAYOUTS = {
    "single": "one process",
    "tp2_sp": "tp2 SP",
    "pp2_vpp2": "pp2 vpp2",
    "cp2": "cp2",
    "dp2": "dp2, with experts ep2",
    "prefixes": "shared prefixes",
    "wide": "rows over two ranks",
    "pieces": "samples in pieces, pp2",
}
VARIANTS = {
    "plain": "tied, RMSNorm, SwiGLU",
    "other": "untied, LayerNorm, GELU, wide heads, query norms, temperature 0.7",
    "bf16": "bf16, fp32 main gradients",
    "moe": "4 experts, top 2, balance and z-loss",
    "moe_bias": "4 experts, sigmoid scores, expert bias",
    "moe_replay": "4 experts, routes replayed that are not the routers' own",
    "moe_shared": "3 dense layers, then 8 experts in 4 groups and a gated shared one, QKV bias, "
    "llama3 rope of half a head",
    "mla": "multi-latent attention with yarn, temperature 0.9",
    "mtp": "multi-token prediction, 2 depths, temperature 0.8",
    "mtp_other": "multi-token prediction, 2 depths, untied, temperature 0.8",
    "mtp_moe": "multi-token prediction, 1 depth, and 4 experts",
    "mla_as_hybrid": "multi-latent attention with yarn, letters of a HybridModel, temperature 0.9",
    "dsa_as_hybrid": "sparse attention, letters of a HybridModel, temperature 0.9",
    "mtp_hybrid": "gated delta nets and experts, multi-token prediction, 2 depths",
    "gated_delta": "gated delta nets, attention with a gate, 4 experts and a gated shared one",
    "mamba": "Mamba-2, attention without positions, 4 experts with squared ReLU",
    "moe_latent": "3 dense layers, then 8 experts at a latent width and a gated shared one",
    "mamba_latent": "Mamba-2, 4 experts at a latent width, multi-token prediction, 1 depth",
    "hybrid": "gated delta nets, Mamba-2 and attention",
    "gpt_as_hybrid": "dense layers, then experts in groups, as a HybridModel of blocks",
    "streams": "hyper-connections over 3 streams, temperature 0.9",
}


def layout_text(layout: Layout, has_experts: bool) -> str:
    names = [n for n in ("dp", "tp", "pp", "vpp", "cp", "ep") if getattr(layout, n) > 1]
    if layout.tp > 1 and has_experts:
        names.append("etp")
    text = " ".join(f"{name}{getattr(layout, name)}" for name in names)
    group_size = layout.microbatch_group_size
    extras = ["SP"] if layout.sequence_parallel else []
    if group_size is not None:
        extras.append(f"G={group_size}")
    return " ".join([text or "one process", *extras])


def case_layout(case: Case) -> str:
    return layout_text(case.layout, bool(problem.MODELS[case.variant][0].num_experts))


def feature_text(case: Case) -> str:
    """The features of a case beyond the plainest one."""
    frozen = ", ".join(f"`{name}`" for name in case.frozen)
    mtp = problem.MODELS[case.variant][0].mtp_num_layers
    split = case.stage_layers.to_text(mtp).replace("|", r"\|")
    has_feature = {
        VARIANTS.get(case.variant, case.variant): case.variant != "plain",
        f"layers `{split}`": not case.stage_layers.is_even,
        f"recompute {case.recompute}": case.recompute != "none",
        f"{case.policy.row_shape} rows": case.policy.row_shape != "planned",
        f"count-based, {case.micro_batch_size} a row": case.budget is None,
        case.weighting: case.weighting != "token-mean",
        f"frozen {frozen}": bool(case.frozen),
        "forward pass by its own plan": case.forward_budget is not None,
        "stages that share a device": case.staged,
        "padding micro-batches": case.expect.get("padding", False),
        "dropped rollouts": case.expect.get("dropped", False),
        "M % G": case.expect.get("remainder", False),
    }
    return "; ".join(text for text, applies in has_feature.items() if applies) or "-"


def measure(names: list[str]) -> dict[str, dict[str, Any]]:
    """The workers' results, by case."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = run_cases(names, folder, folder)
    return {name: results[name] for name in names}


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "| layout | feature | M | gradient | worst parameter | log-probs mean | log-probs max |"
    ]
    lines.append("|---" * 7 + "|")
    for name, case in EVERY_CASE.items():
        if name not in results or case.variant in problem.PRECISE:
            continue
        result = results[name]
        counts = "/".join(map(str, dict.fromkeys(result["facts"]["counts"])))
        errors = " | ".join(
            f"{result[key]:.1e}"
            for key in (
                "gradient_error",
                "worst_parameter",
                "logprob_mean_error",
                "logprob_max_error",
            )
        )
        lines.append(f"| {case_layout(case)} | {feature_text(case)} | {counts} | {errors} |")
    return lines


def rounded_table(results: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["| layout | feature | gradient, packed | gradient, one sample | log-probs mean |"]
    lines.append("|---" * 5 + "|")
    for name, result in results.items():
        if ALL_CASES[name].variant in problem.PRECISE:
            errors = " | ".join(
                f"{result[key]:.3f}"
                for key in ("gradient_error", "one_sample_gradient_error", "logprob_mean_error")
            )
            lines.append(
                f"| {case_layout(ALL_CASES[name])} | {feature_text(ALL_CASES[name])} | {errors} |"
            )
    return lines


def model_table(results: dict[str, dict[str, Any]]) -> list[str]:
    """Per family and layout: gradient error, and the largest log-prob or entropy error."""
    layouts = [name for name in MODEL_LAYOUTS if any(name == key.split("-")[1] for key in results)]
    lines = ["| model | " + " | ".join(MODEL_LAYOUTS[name] for name in layouts) + " |"]
    lines.append("|---" * (1 + len(layouts)) + "|")
    for family in ALL_FAMILIES:
        found = [results.get(f"{family}-{name}") for name in layouts]
        cells = ["-" if one is None else _model_errors(one) for one in found]
        if any(found):
            lines.append(f"| {MODELS.get(family, family)} | {' | '.join(cells)} |")
    return lines


def _model_errors(result: dict[str, Any]) -> str:
    largest = max(result["logprobs_max_error"], result["entropy_max_error"])
    return f"{result['gradient_error']:.1e}, {largest:.1e}"


def row_grid(
    names: Iterable[str], results: dict[str, dict[str, Any]], head: str, text: Callable[..., str]
) -> list[str]:
    """Per layout and what `text` says of a case: gradient and largest output error per objective.

    Args:
        names: cases of the same objectives. Of those without a result there is no line.
    """
    names = [name for name in names if name in results]
    if not names:
        return []
    kinds = ROW_CASES[names[0]].kinds
    heads = ["layout", head, *(_KIND_TEXTS[kind] for kind in kinds)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in names:
        case = ROW_CASES[name]
        cells = [_row_layout(case), text(case), *(_row_errors([results[name][k]]) for k in kinds)]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def special_rows(group: str, results: dict[str, dict[str, Any]]) -> list[str]:
    """Per shape or feature: what its plans have, and the largest errors of its objectives.

    Cases whose objectives read an engine or a teacher have a table of their own.
    """
    columns = _ROW_COLUMNS[group]
    heads = ["feature", "layout", "objectives", *columns, "gradient, outputs"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for short in ROW_GROUPS[group].SPECIAL:
        name = f"{group}/{short}"
        case = ROW_CASES[name]
        if name in results and case.kinds != TAUGHT and case.model not in ROW_PRECISE:
            runs = list(results[name].values())
            cells = [case.features or "-", _row_layout(case)]
            cells.append(", ".join(_KIND_TEXTS[kind] for kind in results[name]))
            cells += [text(runs[0]["facts"]) for text in columns.values()]
            lines.append(f"| {' | '.join(cells)} | {_row_errors(runs)} |")
    return lines if len(lines) > 2 else []


_ROW_COLUMNS: dict[str, dict[str, Callable[[dict[str, Any]], str]]] = {
    "prefixes": {"saved tokens": lambda facts: f"{facts['shared_tokens']} of {facts['tokens']}"},
    "wide": {
        "rows over 1, 2, 4 ranks": lambda facts: ", ".join(
            str(facts[f"rows_{width}"]) for width in (1, 2, 4)
        ),
        "GPUs of a row": lambda facts: ", ".join(map(str, facts["gpus"])),
    },
    "split": {},
    "hybrid": {},
    "streams": {},
}
"""What the table of a group says of a case's plans."""
_KIND_TEXTS = {
    "sft": "SFT",
    "sft_all": "SFT on prompts too",
    "grpo": "GRPO",
    "gspo": "GSPO",
    "gspo_token": "GSPO by tokens",
    "tis": "GRPO with TIS",
    "tis_sequence": "GSPO with TIS",
    "seq_mask_tis": "GRPO with masked samples",
    "distill_forward": "distillation",
    "distill_reverse": "reverse distillation",
    "teacher_kl": "GRPO with a teacher's log-probs",
    "dpo": "DPO",
    "value": "value",
    "reward": "reward",
}


def _row_layout(case: RowCase) -> str:
    return layout_text(case.layout, bool(ROW_MODELS[case.model].num_experts))


def _row_errors(runs: list[dict[str, Any]]) -> str:
    outputs = [run.get("logprob_max_error", run.get("output_error")) for run in runs]
    return f"{max(run['gradient_error'] for run in runs):.1e}, {max(outputs):.1e}"


def case_lines(names: list[str]) -> list[str]:
    """What was found beside the one-sample reference."""
    if not names:
        return []
    results = measure(names)
    cases = EVERY_CASE
    exact = [r for name, r in results.items() if cases[name].variant not in problem.PRECISE]
    lines = [
        f"{len(exact)} cases in fp32; largest gradient error "
        f"{max((r['gradient_error'] for r in exact), default=0):.1e}, largest log-prob error "
        f"{max((r['logprob_max_error'] for r in exact), default=0):.1e} nats.",
        "",
        *table(results),
    ]
    if len(exact) < len(results):
        lines += ["", "In bf16, against the same fp32 reference:", "", *rounded_table(results)]
    return lines


def model_lines(names: list[str]) -> list[str]:
    """What was found beside transformers."""
    if not names:
        return []
    with tempfile.TemporaryDirectory() as folder:
        results = run_hf_cases(names, Path(folder))
    values = results.values()
    return [
        f"{len(results)} cases; largest error of a tensor's gradient "
        f"{max(r['worst_tensor_error'] for r in values):.1e}, largest mean error of log-probs "
        f"{max(r['logprobs_mean_error'] for r in values):.1e} nats.",
        "",
        *model_table(results),
    ]


_VISION_ROWS = {
    "whole": "whole samples",
    "shared": "shared prefixes",
    "pieces": "pieces",
    "shared_pieces": "shared prefixes in pieces",
    "wide": "over two ranks",
    "split": "split backwards",
}
_VISION_TRAINED = {
    "all": "all",
    "merger": "merger alone",
    "tower": "tower alone",
    "frozen": "decoder alone",
}


def vision_lines(names: list[str]) -> list[str]:
    """What was found for models with images beside transformers."""
    if not names:
        return []
    with tempfile.TemporaryDirectory() as folder:
        results = run_vision_cases(names, Path(folder))
    parts = ("tower", "merger", "deepstack", "decoder")
    columns = ("logprobs_max_error", "norm_error")
    largest = [
        max(found["gradients"].get(part, 0.0) for found in results.values()) for part in parts
    ]
    logprob = max(found["logprobs_max_error"] for found in results.values())
    lines = [
        f"{len(results)} cells; largest errors of a tensor's gradient: tower {largest[0]:.1e}, "
        f"mergers {largest[1]:.1e}, DeepStack's mergers {largest[2]:.1e}, decoder "
        f"{largest[3]:.1e}; of a log-prob {logprob:.1e} nats.",
        "",
        "| model | layout | rows | trained | recompute | log-prob | tower | merger | DeepStack | "
        "decoder | norm |",
        "|---" * 11 + "|",
    ]
    for name in names:
        case, found = VISION_CASES[name], results[name]
        cells = [
            case.family,
            layout_text(case.layout, "moe" in case.family),
            _VISION_ROWS[case.rows]
            + (", then a step of text" if case.text_step else "")
            + (", one image" if case.samples == "few" else "")
            + (", the tower in waves" if case.waves else ""),
            _VISION_TRAINED[case.trained],
            case.recompute,
        ]
        numbers = [found[columns[0]], *(found["gradients"].get(part) for part in parts)]
        numbers.append(found[columns[1]])
        cells += ["-" if number is None else f"{number:.1e}" for number in numbers]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def row_lines(group: str, pattern: str) -> list[str]:
    """What was found for a group of rows that are made in a special way."""
    names = [
        n for n in fnmatch.filter(ROW_CASES, f"{group}/{pattern}") if not ROW_CASES[n].mutation
    ]
    if not names:
        return []
    with tempfile.TemporaryDirectory() as folder:
        results = run_row_cases(names, Path(folder))
    grid = [f"{group}/{name}" for name in ROW_GROUPS[group].GRID]
    taught = [name for name in names if ROW_CASES[name].kinds == TAUGHT]
    lines = [
        *(row_summary(results), ""),
        *row_grid(grid, results, "recompute", lambda case: case.recompute),
        *row_grid(taught, results, "feature", lambda case: case.features or "-"),
        *special_rows(group, results),
    ]
    rounded = [results[name] for name in names if ROW_CASES[name].model in ROW_PRECISE]
    for run in [run for runs in rounded for run in runs.values()][:1]:
        lines += [
            "",
            f"In bf16 the gradient error against fp32 is {run['gradient_error']:.3f}, and "
            f"{run['one_sample_gradient_error']:.3f} with one sample at a time.",
        ]
    return lines


def row_summary(results: dict[str, dict[str, Any]]) -> str:
    """The number of cells, and the largest errors."""
    runs = [(name, kind, run) for name, found in results.items() for kind, run in found.items()]
    exact = [(kind, run) for name, kind, run in runs if ROW_CASES[name].model not in ROW_PRECISE]
    # A gradient that is 0 has no relative error, see tests/dist/rows/test_row_cases.py.
    tensors = [run["worst_parameter"] for kind, run in exact if kind != "reward"]
    means = [run["logprob_mean_error"] for _, run in exact if "logprob_mean_error" in run]
    equal = sum(run["square_to_forward"] == 0 for *_, run in runs)
    return (
        f"{len(runs)} cells; in the {len(exact)} of fp32, the largest gradient error is "
        f"{max(r['gradient_error'] for _, r in exact):.1e}, of a single tensor {max(tensors):.1e}, "
        f"and the largest mean error of log-probs {max(means):.1e} nats. In {equal} cells the "
        "forward pass has the bits of the training forward."
    )


def te_lines(patterns: Mapping[str, str]) -> list[str]:
    """Over Transformer Engine, per grid: the largest errors of its cases in fp32.

    Args:
        patterns: grid of `tests/dist/exactness/te_cases.py` -> glob of its cases.
    """
    lines = [
        "| cases | run | refused | gradient | one tensor | log-probs mean | log-probs max |",
        "|---" * 7 + "|",
    ]
    for grid, pattern in patterns.items():
        cases, run = GRIDS[grid]
        names = [name for name in cases if fnmatch.fnmatch(name.rpartition("/")[2], pattern)]
        taken = [name for name in names if not refusal(grid, name)]
        if not taken:
            continue
        with tempfile.TemporaryDirectory() as folder:
            results = run(taken, Path(folder))
        exact = [result for name in taken for result in _exact_runs(cases[name], results[name])]
        errors = " | ".join(f"{_largest(exact, keys):.1e}" for keys in _TE_ERRORS)
        lines.append(f"| {grid} | {len(taken)} | {len(names) - len(taken)} | {errors} |")
    reasons = {refusal(grid, name) for grid in patterns for name in GRIDS[grid][0]} - {""}
    refused = f"Refused before a step: {'; '.join(sorted(reasons))}."
    return [*lines, "", refused] if reasons else lines


_TE_ERRORS = (
    ("gradient_error",),
    ("worst_parameter", "worst_tensor_error"),
    ("logprob_mean_error", "logprobs_mean_error"),
    ("logprob_max_error", "logprobs_max_error"),
)


def _exact_runs(case: Any, result: dict[str, Any]) -> list[dict[str, Any]]:
    """A case's results in fp32: one of a layout or a folder, one per objective of rows."""
    if isinstance(case, RowCase):
        # A reward's gradient of the last norm's bias is 0, which has no relative error.
        runs = [run for kind, run in result.items() if kind != "reward"]
        return runs if case.model not in ROW_PRECISE else []
    return [] if getattr(case, "variant", "") in problem.PRECISE else [result]


def _largest(runs: list[dict[str, Any]], keys: tuple[str, ...]) -> float:
    return max(run[key] for run in runs for key in keys if key in run)


def publish_kind(name: str, lines: list[str], *packages: str, whole: bool) -> None:
    """Print a kind's table; write it where Megatron's schedules ran all of its cases."""
    if not lines:
        print(f"{name}: the pattern names no case")
        return
    with_versions = f"{versions(*packages, 'megatron-core', 'torch')}, gloo"
    publish(name, lines, with_versions, whole=whole and executor() != "operations")


def publish_te(patterns: Mapping[str, str], release: str) -> None:
    """Run the grids over Transformer Engine's layers, see `te_lines`."""
    with_versions = f"{versions('megatron-core', 'torch')}, gloo, Transformer Engine {release}"
    whole = is_whole(*patterns.values()) and patterns.keys() >= GRIDS.keys() - {*APART}
    publish("exactness_te", te_lines(patterns), with_versions, whole=whole)


def publish_hybrid(pattern: str) -> None:
    """Run the cases of hybrid models: rows, layouts, and folders beside transformers."""
    whole = is_whole(pattern)
    publish_kind("hybrid_rows", row_lines("hybrid", pattern), whole=whole)
    publish_kind("hybrid_layouts", case_lines(fnmatch.filter(HYBRID_CASES, pattern)), whole=whole)
    publish_models("hybrid_models", pattern, is_hybrid=True)


def publish_streams(pattern: str) -> None:
    """Run the cases of models with hyper-connections: layouts, then rows."""
    lines = [
        *case_lines(fnmatch.filter(STREAMS_CASES, pattern)),
        "",
        *row_lines("streams", pattern),
    ]
    # A source tree is not the installed package, whose version `versions` gives.
    megatron = f"Megatron-LM's sources, {megatron_version}"
    publish(
        "exactness_streams",
        lines,
        f"{megatron}, {versions('torch')}, gloo",
        whole=is_whole(pattern),
    )


def publish_models(name: str, pattern: str, *, is_hybrid: bool) -> None:
    """Run the cases of models of Hugging Face folders."""
    names = [n for n in runnable() if HF_CASES[n].is_hybrid == is_hybrid]
    lines = model_lines(fnmatch.filter(names, pattern))
    publish_kind(name, lines, "transformers", whole=is_whole(pattern))


def compare_bits(pattern: str) -> bool:
    """Run cases under both executors on one model and print what differs; whether nothing does."""
    worlds = {name: case.world for name, case in ALL_CASES.items()}
    worlds |= {f"{OVERLAP}{n}": case.layout.world_size for n, case in OVERLAP_CASES.items()}
    names = fnmatch.filter(worlds, pattern)
    results: dict[str, dict[str, Any]] = {}
    for world in sorted({worlds[name] for name in names}):
        own = [name for name in names if worlds[name] == world]
        # Each case leaves its process groups and their threads behind.
        for first in range(0, len(own), 6):
            part = own[first : first + 6]
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "out.json"
                args = [str(out), *part]
                checked_job(world, "tests.dist.schedule.operations_worker", args, timeout_s=600)
                results |= json.loads(out.read_text())
            for name in part:
                differ = results[name]["differ"]
                print(
                    name, results[name]["compared"], "tensors,", len(differ), "differ", *differ[:3]
                )
    equal = sum(not result["differ"] for result in results.values())
    print(f"{equal} of {len(results)} cases have the bits of Megatron's schedules")
    return equal == len(results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", help="glob of the cases to run")
    parser.add_argument("--models", help="glob of the cases of Hugging Face models to run")
    parser.add_argument("--prefixes", help="glob of the cases with shared prefixes to run")
    parser.add_argument("--dynamic-cp", help="glob of the cases with wide rows to run")
    parser.add_argument("--split-samples", help="glob of the cases with samples in pieces to run")
    parser.add_argument("--hybrid", help="glob of the cases of hybrid models to run")
    parser.add_argument("--streams", help="glob of the cases with hyper-connections to run")
    parser.add_argument("--vision", help="glob of the cases of models with images to run")
    parser.add_argument("--executor", choices=get_args(Executor), default="megatron")
    parser.add_argument("--attention", choices=("sdpa", "te"), default="sdpa")
    parser.add_argument("--te", default=te_python.VERSION, help="release of Transformer Engine")
    options = parser.parse_args()
    os.environ[VARIABLE] = options.executor
    patterns = (
        options.cases,
        options.prefixes,
        options.dynamic_cp,
        options.split_samples,
        options.models,
    )
    apart = (options.hybrid, options.vision)
    everything = all(pattern is None for pattern in (*patterns, *apart, options.streams))
    if options.attention == "te":
        if te_python.without_te(options.te):
            parser.error(te_python.without_te(options.te))
        os.environ[te_python.VARIABLE] = options.te
        globs = {
            grid: pattern or "*"
            for grid, pattern in zip(GRIDS, (*patterns, *apart), strict=True)
            if pattern is not None or (everything and grid not in APART)
        }
        publish_te(globs, options.te)
        return 0
    if options.hybrid is not None:
        publish_hybrid(options.hybrid)
    if options.streams is not None:
        publish_streams(options.streams)
    if options.vision is not None:
        lines = vision_lines(fnmatch.filter(runnable_vision(), options.vision))
        whole = is_whole(options.vision)
        publish_kind("exactness_vision", lines, "transformers", whole=whole)
    for group, pattern, name in (
        ("wide", options.dynamic_cp, "exactness_dynamic_cp"),
        ("split", options.split_samples, "exactness_split_samples"),
        ("prefixes", options.prefixes, "exactness_prefixes"),
    ):
        if everything or pattern is not None:
            publish_kind(name, row_lines(group, pattern or "*"), whole=is_whole(pattern))
    if everything or options.models is not None:
        publish_models("exactness_models", options.models or "*", is_hybrid=False)
    if everything or options.cases is not None:
        names = fnmatch.filter(ALL_CASES, options.cases or "*")
        if options.executor == "operations":
            return 0 if compare_bits(options.cases or "*") else 1
        publish_kind("exactness_layouts", case_lines(names), whole=is_whole(options.cases))
    return 0


if __name__ == "__main__":
    sys.exit(main())
