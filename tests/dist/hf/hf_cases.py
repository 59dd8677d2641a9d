"""Models of Hugging Face folders on layouts, compared with transformers one sample at a time."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapack.layout import Layout
from megapack.policy import Policy
from tests import hf_models, hf_mtp
from tests.dist.spawn import checked_job
from tests.megatron import HAS_HYBRID, MODEL_CLASS

FAMILIES = (
    *("llama", "llama3_rope", "mistral", "mistral_window", "qwen2", "qwen2_window", "qwen3"),
    *("qwen3_tied", "qwen3_yarn", "qwen2_moe", "mixtral", "qwen3_moe"),
    *("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe", "gpt_oss"),
    *("moonlight", "deepseek_v2", "deepseek_v2_groups", "glm4_moe_lite", "seed_oss"),
    *("ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense", "hunyuan_v1_moe", "mimo"),
    *("glm4", "minimax_m2"),
    *("olmo2", "olmo3", "phi3", "gemma2", "gemma3_text"),
    *("gemma4_text", "gemma4_experts", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
)
HYBRID_FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "nemotron_h", "nemotron_super")
AS_HYBRID = {
    "qwen3_tied_hybrid": "qwen3_tied",
    "qwen2_moe_hybrid": "qwen2_moe",
}
"""Families of a GPTModel whose folder is loaded into a HybridModel, by a name of their own."""
MTP_COEF = 0.4
MTP = {
    "mimo_mtp": "mimo",
    "glm4_moe_lite_mtp": "glm4_moe_lite",
    "qwen3_next_mtp": "qwen3_next",
    "nemotron_super_mtp": "nemotron_super",
}
"""Families with their depth of multi-token prediction, by a name of their own."""
ALL_FAMILIES = (*FAMILIES, *HYBRID_FAMILIES, *AS_HYBRID, *MTP)
INDEXED = ("deepseek_v32", "glm_moe_dsa")
EXPERTS = (
    *("qwen2_moe", "mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss"),
    *("minimax_m2", "ernie4_5_moe", "hunyuan_v1_moe", "deepseek_v2_groups"),
    *("moonlight", "deepseek_v2", "glm4_moe_lite", "glm4_moe_lite_mtp", "qwen3_next_mtp"),
    *("deepseek_v32", "glm_moe_dsa", "gemma4_experts"),
    *("qwen3_next", "qwen3_5_moe", "nemotron_h", "qwen2_moe_hybrid", "qwen3_vl_moe"),
    *("nemotron_super", "nemotron_super_mtp"),
)

LAYOUTS = {
    "single": Layout(),
    "tp2_sp": Layout(tp=2, sequence_parallel=True),
    "pp2_vpp2": Layout(pp=2, vpp=2),
    "cp2": Layout(cp=2),
    "dp2": Layout(dp=2),
}
"""By name; with experts `dp2` also has ep2."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """How rows are made of the samples, if not by a plan's defaults."""

    layout: Layout
    max_tokens: int
    policy: Policy | None = None
    shares_prefixes: bool = False
    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keys of `ModelConfig`."""


ROWS = {
    "prefixes": Rows(layout=Layout(), max_tokens=128, shares_prefixes=True),
    "wide": Rows(layout=Layout(dp=2), max_tokens=64, policy=Policy(context_parallel="dynamic")),
    "pieces": Rows(
        layout=Layout(pp=2),
        max_tokens=64,
        # Without a shortest piece every sample is cut, and no row holds two.
        policy=Policy(split_samples="auto", least_piece=32),
        keys={"recompute": "full"},
    ),
}
"""Of families whose layers or samples have rotary embeddings or caps of their own, and of hybrid
ones. The sample beyond the length of longrope lies over two ranks, or is in pieces."""
LAYERED = (
    *("olmo3", "phi3", "gemma2", "gemma3_text", "gemma4_text", "gemma4_experts"),
    "gpt_oss",
)
MAX_TOKENS = 128
# A job has 5 minutes.
CASES_PER_JOB = 16
# (prompt, response) tokens; the longest is beyond the 64 positions that yarn stretches.
PAIRS = [(5, 20), (3, 1), (8, 88), (1, 30), (12, 21), (6, 58), (1, 1), (9, 14)]


@dataclasses.dataclass(frozen=True)
class HfCase:
    """A family on a layout."""

    family: str
    layout_name: str

    @property
    def name(self) -> str:
        """The case's name in tests."""
        return f"{self.family}-{self.layout_name}"

    @property
    def is_hybrid(self) -> bool:
        """Whether the case needs HybridModel."""
        return self.folder not in FAMILIES or self.family in AS_HYBRID

    @property
    def folder(self) -> str:
        """The family of `hf_models`."""
        return (AS_HYBRID | MTP).get(self.family, self.family)

    @property
    def reference(self) -> str:
        """The file of transformers' results."""
        return f"{self.folder}_mtp.pt" if self.family in MTP else f"{self.folder}.pt"

    @property
    def keys(self) -> dict[str, Any]:
        """Keys of `ModelConfig` in addition to the folder's."""
        own: dict[str, Any] = {}
        if MODEL_CLASS and self.folder in FAMILIES:
            own["megatron_class"] = MODEL_CLASS
        if self.layout_name in ROWS:
            return own | dict(ROWS[self.layout_name].keys)
        if self.family in MTP:
            return own | {"mtp_num_layers": 1, "mtp_loss_coef": MTP_COEF}
        if self.family in AS_HYBRID:
            return {"megatron_class": "hybrid"}
        # The loss of indexers, which transformers lacks, must not reach the other weights.
        return own | ({"indexer_loss_coef": 0.1} if self.family in INDEXED else {})

    @property
    def layout(self) -> Layout:
        """The layout of its family's kind."""
        if self.layout_name in ROWS:
            return ROWS[self.layout_name].layout
        layout = LAYOUTS[self.layout_name]
        has_experts = self.family in EXPERTS
        return dataclasses.replace(layout, ep=layout.dp) if has_experts else layout


HF_CASES = {
    case.name: case
    for case in (
        *(HfCase(family, name) for name in LAYOUTS for family in ALL_FAMILIES),
        *(HfCase(family, name) for name in ROWS for family in (*LAYERED, *HYBRID_FAMILIES)),
    )
    # Prefixes are refused where long samples are rotated otherwise.
    if case.name != "phi3-prefixes"
}
"""All cases."""


def runnable() -> list[str]:
    """The cases that the installed Megatron-Core can run."""
    return [name for name, case in HF_CASES.items() if HAS_HYBRID or not case.is_hybrid]


def samples() -> tuple[list[Tensor], list[Tensor]]:
    """Prompts and responses, the same in every process; three prompts begin alike."""
    generator = torch.Generator().manual_seed(7)

    def tokens(count: int) -> Tensor:
        return torch.randint(0, hf_models.VOCAB_SIZE, (count,), generator=generator)

    prompts = [tokens(prompt) for prompt, _ in PAIRS]
    for i in (5, 7):
        prompts[i] = prompts[4][: len(prompts[i])]
    return prompts, [tokens(response) for _, response in PAIRS]


def write_reference(folder: Path, family: str) -> None:
    """A model's folder, and transformers' results on the samples beside it.

    With a depth of multi-token prediction there are two files of results: without and with its
    loss.
    """
    hf_models.make_folder(folder / family, family)
    model = hf_models.load(folder / family, family)
    prompts, responses = samples()
    tokens = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    total = sum(map(len, responses))
    # The mean over all response tokens.
    weights = [
        torch.cat([torch.zeros(len(prompt)), torch.full((len(response),), 1 / total)])
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    logprobs, entropies = hf_models.logprobs_and_entropies(model, tokens)
    loss, gradients = hf_models.sft_gradients(model, tokens, weights)
    results = {"logprobs": logprobs, "entropy": entropies, "loss": loss, "gradients": gradients}
    torch.save(results, folder / f"{family}.pt")
    if hf_models.FAMILIES[family].mtp is None:
        return
    depth = hf_mtp.Depth(family)
    results["mtp_loss"] = hf_mtp.add_gradients(model, depth, tokens, weights, MTP_COEF)
    gradients = hf_models.gradients_of(model)
    results["gradients"] = gradients | depth.tensors(gradients, gradients=True)
    torch.save(results, folder / f"{family}_mtp.pt")


def run_hf_cases(names: Iterable[str], folder: Path) -> dict[str, dict[str, Any]]:
    """Run the cases, in jobs of one layout each; returns what rank 0 found, by case."""
    by_layout: dict[str, list[str]] = {}
    for name in names:
        by_layout.setdefault(HF_CASES[name].layout_name, []).append(name)
    families = {HF_CASES[name].folder for own in by_layout.values() for name in own}
    for family in sorted(families):
        write_reference(folder, family)
    results: dict[str, dict[str, Any]] = {}
    jobs = (
        own[first : first + CASES_PER_JOB]
        for own in by_layout.values()
        for first in range(0, len(own), CASES_PER_JOB)
    )
    for number, own in enumerate(jobs):
        out = folder / f"{number}.json"
        checked_job(
            HF_CASES[own[0]].layout.world_size,
            "tests.dist.hf.hf_worker",
            [str(folder), str(out), *own],
            timeout_s=300,
        )
        results |= json.loads(out.read_text())
    return results
