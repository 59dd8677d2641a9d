"""Bytes on a GPU, compared with published formulas and numbers computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megapack import CostModel, Layout, ModelSizes
from megapack.base.choices import Dtype, Recompute
from megapack.cost.assumed import GpuSpeed, cost_from_sizes
from megapack.cost.memory import ImageLoad, MemoryModel
from megapack.cost.tower import CALL_PATCHES, TowerSizes

pytestmark = pytest.mark.unit

H = 1024
GPT = ModelSizes(
    num_layers=8,
    hidden_size=H,
    ffn_hidden_size=4 * H,
    num_attention_heads=16,
    vocab_size=32000,
    gated_linear_unit=False,
    dtype="bf16",
    untie_embeddings=True,
)
DENSE = 8 * (12 * H * H + 2 * H) + 2 * 32000 * H + H
EXPERTS = replace(GPT, num_experts=16, moe_top_k=2, gated_linear_unit=True)


def model_of(sizes: ModelSizes, **changes: Any) -> MemoryModel:
    """The memory model of these sizes with other options or settings."""
    return changed(MemoryModel(sizes=sizes), **changes)


def changed(model: MemoryModel, **changes: Any) -> MemoryModel:
    options = {name: changes.pop(name) for name in [*changes] if not hasattr(model, name)}
    return replace(model, sizes=replace(model.sizes, **options), **changes)


def bare(model: MemoryModel, layout: Layout) -> list[int]:
    """Parameters, gradients and optimizer bytes summed over stages."""
    found = [model.stage(layout, s, live_tokens=0, row_tokens=0) for s in range(layout.pp)]
    kinds = ("parameters", "gradients", "optimizer")
    return [sum(getattr(stage, kind) for stage in found) for kind in kinds]


def test_a_bf16_parameter_takes_18_bytes_or_6_plus_12_over_dp() -> None:
    model = model_of(GPT, distributed_optimizer=False)
    assert bare(model, Layout(dp=4)) == [2 * DENSE, 4 * DENSE, 12 * DENSE]
    model = model_of(GPT)
    assert bare(model, Layout(dp=4, cp=2)) == [2 * DENSE, 4 * DENSE, 12 * DENSE // 8]
    assert sum(bare(changed(model, dtype="fp32"), Layout())) == 16 * DENSE


def test_the_first_and_last_stage_also_have_the_vocabulary() -> None:
    model = model_of(GPT, untie_embeddings=False, distributed_optimizer=False)
    layout = Layout(pp=4)
    found = [model.stage(layout, s, live_tokens=0, row_tokens=0).parameters for s in range(4)]
    assert found[1] == found[2] == 2 * 2 * (12 * H * H + 2 * H)
    assert found[0] - found[1] == 2 * 32000 * H
    assert found[3] - found[0] == 2 * H
    one = model.stage(Layout(), 0, live_tokens=0, row_tokens=0).parameters
    assert one == 2 * (DENSE - 32000 * H)


def test_a_critic_has_all_weights_but_the_output_matrix_and_a_head() -> None:
    """On one GPU, a bf16 weight takes 18 bytes; activations are not counted twice."""
    model = model_of(GPT, critic=True, distributed_optimizer=False)
    found = model.stage(Layout(), 0, live_tokens=100, row_tokens=100)
    alone = changed(model, critic=False).stage(Layout(), 0, live_tokens=100, row_tokens=100)
    assert found.critic == 18 * (DENSE - 32000 * H + H)
    assert found.total == alone.total + found.critic
    assert (alone.critic, "critic" in alone.parts) == (0, False)
    assert "critic" in str(found)
    stages = [model.stage(Layout(pp=2), s, live_tokens=0, row_tokens=0).critic for s in range(2)]
    assert stages[0] - stages[1] == 18 * (32000 * H - 2 * H)


def test_experts_are_split_over_ep_their_optimizer_over_dp() -> None:
    model = model_of(EXPERTS)
    layout = Layout(dp=8, ep=4)
    experts = 8 * 16 * 3 * H * 4 * H
    dense = 8 * (4 * H * H + 2 * H + 16 * H) + 2 * 32000 * H + H
    weights = dense + experts // 4
    assert bare(model, layout) == [
        2 * weights,
        4 * weights,
        12 * dense // 8 + 12 * (experts // 4) // 2,
    ]


def test_experts_are_split_over_etp_and_not_over_tp() -> None:
    model = model_of(EXPERTS)
    experts = 8 * 16 * 3 * H * 4 * H
    gradients = [
        bare(model, Layout(dp=2, tp=4, ep=ep, etp=etp))[1] // 4
        for ep, etp in [(8, 1), (2, 4), (2, 1)]
    ]
    assert gradients[0] == gradients[1]
    assert gradients[2] - gradients[0] == experts // 2 - experts // 8
    # 8 GPUs: of (8, 1) each expert is on one, of (2, 1) on 4, which split its optimizer's state.
    optimizer = [bare(model, Layout(dp=2, tp=4, ep=ep))[2] for ep in (8, 2)]
    assert optimizer[0] == optimizer[1]


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_activations_match_the_published_formula(tp: int, sequence_parallel: bool) -> None:
    """Korthikanti et al. 2022 without masks: 10h + 24h / t becomes 8h + 24h / t, and with sequence
    parallelism 34h / t becomes 32h / t. In addition the statistics of two norms and 16 heads."""
    layout = Layout(tp=tp, sequence_parallel=sequence_parallel)
    scatter = tp if sequence_parallel else 1
    found = model_of(GPT).saved(layout).layer
    assert found == (8 / scatter + 24 / tp) * H + 2 * 4 / scatter + 4 * 16 / tp


def test_other_kernels_keep_the_whole_output_of_linear_qkv() -> None:
    sizes = replace(GPT, num_query_groups=4)
    layers = {
        kernel: model_of(sizes, attention=kernel).saved(Layout()).layer
        for kernel in ("te", "varlen", "sdpa")
    }
    # Queries and keys in addition to the values, and cos and sin of q and k for each token.
    assert layers["varlen"] - layers["te"] == 2 * H * (1 + 0.25) + 4 * 2 * 64
    # The outputs of the samples and the tensor that joins them.
    assert layers["sdpa"] - layers["varlen"] == 2 * H
    selective = model_of(sizes, recompute="selective").saved(Layout()).layer
    # The checkpoint keeps views of queries, keys and values, and recomputes 16 statistics.
    assert selective - layers["te"] == 2 * H * (1 + 0.25) - 4 * 16


def test_what_is_recomputed_is_kept_once() -> None:
    model = model_of(EXPERTS, recompute="selective", recompute_modules=("moe",))
    none = changed(model, recompute="none").saved(Layout())
    saved = model.saved(Layout())
    # Norms, their outputs, queries, keys, values, the output and 16 statistics.
    assert saved.layer == 2 * H * (4 + 4) + 2 * 4 + 4 * 16
    assert saved.recomputed_layer == none.layer - saved.layer
    found = model.stage(Layout(pp=4), 1, live_tokens=4000, row_tokens=1000).activations
    assert found == int(3000 * (2 * saved.layer + 4 * 64) + 1000 * saved.recomputed_layer)
    for modules, freed in (
        (("layernorm",), 2 * 2 * H),
        (("moe_act",), 2 * 2 * 4 * H),
        (("mlp",), 0),
    ):
        layer = changed(model, recompute_modules=modules).saved(Layout()).layer
        assert none.layer - layer == freed, modules


def test_each_stage_holds_its_share_of_live_tokens() -> None:
    model = model_of(GPT)
    layout = Layout(pp=4)
    saved = model.saved(layout)
    first = model.stage(layout, 0, live_tokens=4000, row_tokens=1000)
    middle = model.stage(layout, 1, live_tokens=4000, row_tokens=1000)
    last = model.stage(layout, 3, live_tokens=4000, row_tokens=1000)
    # A token's id on the first stage, and 64 channels of the rotary table in fp32.
    assert first.activations == int(4000 * (2 * saved.layer + 8 + 4 * 64))
    assert middle.activations == int(3000 * (2 * saved.layer + 4 * 64))
    # The final norm's input and statistic, the head's input and four numbers per position.
    head = 2 * H + 4 + 2 * H + 24
    assert last.activations == int(1000 * (2 * saved.layer + 4 * 64 + head))
    assert (first.head, last.head > 0) == (0, True)
    assert model.fullest_stage(layout, live_tokens=4000, row_tokens=1000) == max(
        (model.stage(layout, s, live_tokens=4000, row_tokens=1000) for s in range(4)),
        key=lambda stage: stage.total,
    )
    full = changed(model, recompute="full").stage(layout, 1, live_tokens=4000, row_tokens=1000)
    assert full.activations == int(3000 * (2 * 2 * H + 4 * 64) + 1000 * (saved.layer - 2 * H))
    # Interleaved, the two chunks' outputs and tables stay. Stage 1 has 2 * 2 + 4 + 1 chunks in
    # flight, stage 0 11.
    interleaved = Layout(pp=4, vpp=2)
    found = model.stage(interleaved, 1, live_tokens=11000, row_tokens=1000).activations
    assert found == int(9000 * (2 * saved.layer + 2 * (2 * H + 4 * 64)))


def test_the_head_needs_memory_for_one_chunk_of_logits() -> None:
    model = model_of(GPT, logprob_chunk_tokens=4096)
    long = model.stage(Layout(), 0, live_tokens=0, row_tokens=65536).head
    # fp32 logits and their bf16 gradient.
    assert long == 32000 * 6 * 4096
    assert model.stage(Layout(tp=2), 0, live_tokens=0, row_tokens=65536).head == long // 2
    # A short row: autograd's matrix of the weight's shape is larger.
    assert model.stage(Layout(), 0, live_tokens=0, row_tokens=16).head == 32000 * 2 * H
    wide = changed(model, dtype="fp32").stage(Layout(), 0, live_tokens=0, row_tokens=65536).head
    assert wide == 32000 * 4 * 4096


def test_a_value_head_needs_no_output_matrix_and_no_logits() -> None:
    model = model_of(GPT)
    head = changed(model, value_head=True)
    for layout in (Layout(), Layout(pp=2)):
        plain, own = (
            one.stage(layout, layout.pp - 1, live_tokens=0, row_tokens=1000)
            for one in (model, head)
        )
        assert plain.parameters - own.parameters == 2 * (32000 - 1) * H
        assert (plain.head > 0, own.head) == (True, 0)


FREEZES = {
    "all": (("*",), 0),
    "embedding": (("embedding.*",), DENSE - 32000 * H),
    "all_but_head": (("embedding.*", "decoder.*"), 32000 * H),
    "two_layers": (("decoder.layers.[01].*",), DENSE - 2 * (12 * H * H + 2 * H)),
    "mlps": (("*.mlp.*",), DENSE - 8 * 8 * H * H),
    "norms": (("*layernorm*",), DENSE - 8 * 2 * H - H),
}


@pytest.mark.parametrize("name", FREEZES)
def test_frozen_weights_have_neither_gradients_nor_optimizer(name: str) -> None:
    freeze, trained = FREEZES[name]
    model = model_of(GPT, freeze=freeze)
    assert bare(model, Layout(dp=4)) == [2 * DENSE, 4 * trained, 12 * trained // 4]
    fp32 = changed(model, dtype="fp32", distributed_optimizer=False)
    layout = Layout(pp=2, vpp=2)
    assert bare(fp32, layout) == [4 * DENSE, 4 * trained, 8 * trained]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_muon_keeps_one_moment_of_the_matrices_of_layers(dtype: Dtype) -> None:
    adam = model_of(GPT, dtype=dtype, distributed_optimizer=False)
    muon = changed(adam, muon=True)
    layers = 8 * 12 * H * H
    layout = Layout(pp=2)
    assert [a - b for a, b in zip(bare(adam, layout), bare(muon, layout), strict=True)] == [
        *(0, 0, 4 * layers)
    ]
    frozen = changed(muon, freeze=("*.mlp.*",))
    left = 8 * 4 * H * H
    assert bare(changed(frozen, muon=False), layout)[2] - bare(frozen, layout)[2] == 4 * left
    experts = replace(adam, sizes=replace(EXPERTS, dtype=dtype))
    matrices = 8 * (4 * H * H + 16 * H + 16 * 3 * H * 4 * H)
    saved = bare(experts, Layout())[2] - bare(changed(experts, muon=True), Layout())[2]
    assert saved == 4 * matrices


def test_frozen_matrices_have_no_weight_gradients_to_wait_for() -> None:
    """Of a backward of two products, one is left; attention keeps both of its own."""

    def cost(*frozen: str, recompute: Recompute = "none") -> CostModel:
        return cost_from_sizes(
            replace(GPT, recompute=recompute, freeze=frozen),
            Layout(),
            GpuSpeed(peak_tflops=1.0, attention_utilisation=0.65),
            mean_length=1000.0,
        )

    # Products are five sixths of what layers take outside of attention; the head's cannot wait.
    whole = cost().weight_ratio
    assert 0.5 < whole < 5 / 6
    assert cost().backward_ratio == 2.0
    # 24 H^2 operations in matrices, 2 H in attention per token and key.
    matrices = 24 * H / (24 * H + 2 * 1000)
    assert cost("*").weight_ratio == 0
    assert cost("*").backward_ratio == pytest.approx(2 - matrices)
    assert cost("*", recompute="full").backward_ratio == pytest.approx(3 - matrices)
    # MLPs are 8 of 12 H^2 weights.
    assert cost("*.mlp.*").weight_ratio / whole == pytest.approx(1 / 3, rel=0.1)
    assert cost("decoder.layers.[0-3].*").weight_ratio / whole == pytest.approx(1 / 2, rel=0.1)
    assert cost("embedding.*") == cost()


TOWER = TowerSizes(
    depth=2,
    width=64,
    mlp_width=256,
    is_gated=False,
    patch_numbers=96,
    num_positions=16,
    merge=2,
    out_width=H,
    num_levels=4,
    full_blocks=2,
)


def tower_bytes(model: MemoryModel, layout: Layout, images: ImageLoad) -> list[int]:
    """What images add to the tower's bytes of each stage."""
    found = []
    for s in range(layout.pp):
        one, none = (
            model.stage(layout, s, live_tokens=0, row_tokens=0, images=load).tower
            for load in (images, ImageLoad(0, 0, 0))
        )
        found.append(one - none)
    return found


def test_a_stage_holds_the_features_that_its_layers_read() -> None:
    trained = model_of(GPT, tower=TOWER, trains_tower=True)
    layout = Layout(pp=4)
    read = ImageLoad(0, 1000, 0)
    # The embedding's and those of layers 0 and 1; of layer 2; gradients are fp32.
    assert tower_bytes(trained, layout, read) == [n * 1000 * H * (2 + 4) for n in (3, 1, 0, 0)]
    interleaved = Layout(pp=2, vpp=4)
    assert tower_bytes(trained, interleaved, read) == [n * 1000 * H * 6 for n in (3, 1)]
    frozen = model_of(GPT, tower=TOWER)
    assert tower_bytes(frozen, layout, read) == [n * 1000 * H * 2 for n in (3, 1, 0, 0)]
    # Each GPU has all levels of what it encodes.
    assert tower_bytes(frozen, layout, ImageLoad(4000, 0, 4000)) == [4 * 1000 * H * 2] * 4


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_backward_holds_one_call_of_the_tower_or_the_largest_image(recompute: Recompute) -> None:
    model = model_of(GPT, tower=TOWER, trains_tower=True, recompute=recompute)
    again = recompute == "full"
    call = CALL_PATCHES[again]
    # An image above a call is encoded with recomputation.
    for patches, largest, of_call, alone in (
        (call // 2, call // 4, call // 2, 0),
        (4 * call, call // 4, call, 0),
        (24 * call, 23 * call, call, 23 * call),
        # The largest image may be another GPU's.
        (22 * call, 23 * call, call, 22 * call),
    ):
        (found,) = tower_bytes(model, Layout(), ImageLoad(patches, 0, largest))
        features = TOWER.feature_bytes(patches // 4, 4, is_trained=False)
        kept = TOWER.kept_bytes(of_call, recompute=again), TOWER.kept_bytes(alone, recompute=True)
        assert found == features + max(kept)
