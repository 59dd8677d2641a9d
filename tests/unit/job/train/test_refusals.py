"""What a config alone contradicts is refused in one line, before the ranks meet."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from megapack.base import gpu_environment
from megapack.cli import main

pytestmark = pytest.mark.unit

CONFIG = str(Path(__file__).resolve().parents[4] / "configs" / "dapo_tiny_cpu.yaml")
SP = "layout.tp=2 layout.sequence_parallel=true"
EXPERTS = "model.num_experts=4 model.moe_ffn_hidden_size=32"
HEADS_3 = "model.hidden_size=48 model.num_attention_heads=3 model.num_query_groups=3"
LATENT = (
    "model.num_query_groups=null model.kv_lora_rank=16 model.qk_nope_head_dim=8 "
    "model.qk_rope_head_dim=4 model.v_head_dim=8"
)
OF_RANKS = {
    "layout.tp=3 does not divide the padded vocabulary, a multiple of 128; set layout.tp to a power"
    " of two": f"layout.tp=3 {HEADS_3}",
    "the experts' width 33 does not divide over layout.etp=2; set a multiple of 2, or layout.etp "
    "to a divisor of 33": (f"{SP} layout.etp=2 model.num_experts=4 model.moe_ffn_hidden_size=33"),
    "model.linear_bias=true with layout.etp=2: each rank": (
        f"{SP} layout.etp=2 {EXPERTS} model.linear_bias=true"
    ),
    "= 5 ranks, the job has 6; start 5": "layout.dp=5",
    "plan.split_samples=auto with fp8_recipe='delayed'": (
        "device=cuda model.fp8=delayed model.dtype=bf16 model.hidden_size=64 "
        "plan.split_samples=auto"
    ),
}
"""What `checked_layout` refuses: each message, and the overrides that it is of."""
REFUSED = OF_RANKS | {
    "model.num_attention_heads=3 does not divide over layout.tp=2; set": f"layout.tp=2 {HEADS_3}",
    "model.ffn_hidden_size=33 does not divide over layout.tp=2; set": (
        "layout.tp=2 model.ffn_hidden_size=33"
    ),
    "model.num_experts=3 does not divide over layout.ep=2; set": "layout.ep=2 model.num_experts=3",
    "model.num_experts=4 with layout.tp=2 needs layout.sequence_parallel=true": (
        f"layout.tp=2 {EXPERTS}"
    ),
    "model.kv_lora_rank=16 with layout.tp=2 needs layout.sequence_parallel=true": (
        f"layout.tp=2 {LATENT}"
    ),
    "layout.vpp=2 with layout.pp=1; set": "layout.vpp=2",
    "model.fp8=blockwise needs a GPU; set device=cuda or model.fp8=null": (
        "model.fp8=blockwise model.dtype=bf16"
    ),
    "pipeline_model_parallel_layout='Et|tttttL' has 6 t, the model 2 t": (
        "layout.pp=2 layout.pipeline_model_parallel_layout='Et|tttttL'"
    ),
    "unknown key train.on_oom; ": "train.on_oom=replan",
}
"""With those that are refused when the config is read."""


def run(overrides: list[str], capfd: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    capfd.readouterr()
    code = main(["train", CONFIG, *overrides, *options])
    return code, capfd.readouterr().err


@pytest.mark.parametrize("message", REFUSED)
def test_a_config_is_refused_before_the_ranks_meet(
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    overrides = REFUSED[message].split()

    def meet(*args: object, **kwargs: object) -> None:
        raise AssertionError("the ranks have met")

    monkeypatch.setattr(dist, "init_process_group", meet)
    # Under device=cuda they would stay set.
    monkeypatch.setattr(gpu_environment, "set_missing_variables", lambda **_: None)
    dry = run(overrides, capfd, "--dry-run", "world=6")
    places = {"WORLD_SIZE": 6, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    for name, value in places.items():
        monkeypatch.setenv(name, str(value))
    found = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        found.append(run(overrides, capfd))
    (code, text), (other_code, other_text) = found
    assert (code, other_code, other_text) == (2, 2, "")
    assert message in text
    assert text.startswith("megapack: ")
    assert len(text.splitlines()) == 1
    assert dry == (2, text)
