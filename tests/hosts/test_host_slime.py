from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapack import Layout
from megapack.errors import DataError
from megapack.hosts import slime
from megapack.hosts.shared import flops
from megapack.hosts.shared.rollout_schedule import layout_of
from tests.hosts.rollouts import (
    Schedule,
    check_schedule,
    first_fit_kept,
    make_args,
    make_config,
    rollouts_of,
    rows_of,
)

pytestmark = pytest.mark.hosts

LONG = 30_000
BUDGET = 32_768


def planned(
    sizes: list[int], lengths: list[int], config: dict[str, Any], **changes: Any
) -> Schedule:
    """One step of all rollouts, checked."""
    ids = rollouts_of(sizes)
    args = make_args(**changes)
    schedule = slime.build_dp_schedule(
        args, config, lengths, global_batch_size=len(sizes), rollout_indices=ids
    )
    check_schedule(
        schedule,
        lengths,
        ids,
        config,
        global_batch_size=len(sizes),
        max_tokens_per_gpu=args.max_tokens_per_gpu,
    )
    return schedule


def test_slime_0_3_0_names_the_rollouts_otherwise() -> None:
    """Its `group_indices` are what 0.3.1 calls `rollout_indices`."""
    ids = rollouts_of([2, 1, 1])
    config = make_config(dp=2)

    def schedule(**indices: Any) -> Schedule:
        return slime.build_dp_schedule(
            make_args(max_tokens_per_gpu=1024),
            config,
            [700, 500, 300, 200],
            global_batch_size=3,
            **indices,
        )

    assert schedule(group_indices=ids) == schedule(rollout_indices=ids)
    for wrong in ({}, {"rollout_indices": ids, "group_indices": ids}):
        with pytest.raises(DataError, match=f"{len(wrong)} of rollout_indices and group_indices"):
            schedule(**wrong)
    for name, says in (("group_indices", "num_groups"), ("rollout_indices", "num_rollouts")):
        with pytest.raises(AssertionError, match=rf"{says} \(2\) < global_batch_size \(3\)"):
            schedule(**{name: [0, 0, 1, 1]})


@pytest.mark.parametrize(
    ("sizes", "kept", "samples"),
    [([2, 2] + [1] * 510, 510, 512), ([3, 2, 3, 1, 2], 3, 8)],
    ids=["514 singletons", "ragged rollouts"],
)
def test_whole_trailing_rollouts_are_dropped(
    sizes: list[int], kept: int, samples: int, caplog: pytest.LogCaptureFixture
) -> None:
    schedule = planned(sizes, [LONG] * sum(sizes), make_config(dp=4), max_tokens_per_gpu=BUDGET)
    assert schedule[2:] == ([samples // 4], [kept])
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    dropped = len(sizes) - kept
    assert warnings == [
        f"step 0: dropped {dropped} trailing rollout(s) ({kept} kept, {samples} samples)"
    ]


@pytest.mark.parametrize(
    ("sizes", "config", "says"),
    [
        ([1, 1, 4, 1, 3, 1], make_config(dp=4), ["step 0", "11 samples", "align_to=4"]),
        ([1] * 12, make_config(dp=2, vpp=2, group=8), ["step 0", "12 samples", "align_to=16"]),
        ([1, 1], make_config(dp=4), ["step 0", "2 samples", "align_to=4"]),
    ],
    ids=["no prefix divides", "fewer samples than align_to", "fewer samples than ranks"],
)
def test_a_step_that_cannot_be_aligned_is_refused(
    sizes: list[int], config: dict[str, Any], says: list[str]
) -> None:
    for kind in (ValueError, AssertionError):
        with pytest.raises(kind, match="cannot align micro-batches") as caught:
            planned(sizes, [LONG] * sum(sizes), config, max_tokens_per_gpu=BUDGET)
        assert all(part in str(caught.value) for part in says)


def test_only_one_step_drops_rollouts() -> None:
    """Step 1 has 5 samples at dp=2. Without its last rollout, of two samples, it has 3; then 2."""
    schedule = slime.build_dp_schedule(
        make_args(max_tokens_per_gpu=BUDGET),
        make_config(dp=2),
        [LONG] * 9,
        global_batch_size=4,
        rollout_indices=rollouts_of([1, 1, 1, 1, 1, 1, 1, 2]),
    )
    assert schedule[2:] == ([2, 1], [4, 2])


@pytest.mark.parametrize("flags", [{}, {"balance_data": True}, {"balance_by_flops": True}])
def test_ranks_are_balanced_by_flops(flags: dict[str, bool]) -> None:
    """A squared token costs 1/19 of a token: 96 tokens cost 11040, six samples of 32 cost 9792.
    By FLOPs the long sample is alone on its rank; by tokens it would share it."""
    small = {"hidden_size": 4, "num_attention_heads": 1, "num_query_groups": 1, "kv_channels": 4}
    small |= {"ffn_hidden_size": 1, "vocab_size": 1, "num_layers": 1000}
    for sizes, alone in ((small, True), ({"vocab_size": None}, False)):
        schedule = planned(
            [1] * 7,
            [96] + [32] * 6,
            make_config(dp=2),
            max_tokens_per_gpu=192,
            **flags,
            **sizes,
        )
        assert ([0] in schedule[0]) == alone


def test_static_schedules_are_slimes_own(originals: dict[str, Any]) -> None:
    args = make_args(use_dynamic_batch_size=False)
    originals["slime.utils.dp_schedule.build_dp_schedule"] = lambda *given, **named: (given, named)
    config = make_config(dp=2)
    found = slime.build_dp_schedule(args, config, [5, 6], global_batch_size=2, group_indices=[0, 1])
    named = {"global_batch_size": 2, "group_indices": [0, 1]}
    assert found == ((args, config, [5, 6]), named)  # type: ignore[comparison-overlap]


def test_every_legal_count_is_optional() -> None:
    """pp=4, G=8: Megatron runs 12 micro-batches; a multiple of 8 drops four rollouts."""
    config = make_config(vpp=2, group=8)
    fields = {"max_tokens_per_gpu": BUDGET, "pipeline_model_parallel_size": 4}
    assert planned([1] * 12, [LONG] * 12, config, **fields)[2:] == ([8], [8])
    slime.configure(count_rule="legal")
    args = make_args(**fields)
    schedule = slime.build_dp_schedule(
        args, config, [LONG] * 12, global_batch_size=12, rollout_indices=range(12)
    )
    assert schedule[2:] == ([12], [12])


def split(data: dict[str, Any], config: dict[str, Any], ids: list[int], budget: int) -> Schedule:
    """The schedule of slime's caller, which has the tokens and gives their number."""
    lengths = [len(tokens) for tokens in data["tokens"]]
    schedule = slime.build_dp_schedule(
        make_args(max_tokens_per_gpu=budget),
        config,
        lengths,
        global_batch_size=len(set(ids)) // 2,
        rollout_indices=ids,
    )
    check_schedule(
        schedule,
        lengths,
        ids,
        config,
        global_batch_size=len(set(ids)) // 2,
        max_tokens_per_gpu=budget,
    )
    return schedule


def groups(*sizes: int) -> dict[str, list[list[int]]]:
    """Answers of 20 tokens to prompts of 30, the groups' samples in turn."""
    samples = [(k, group) for group, size in enumerate(sizes) for k in range(size)]
    return {"tokens": [[group] * 30 + [9 + k] * 20 for k, group in sorted(samples)]}


def group_sets(schedule: Schedule, data: dict[str, list[list[int]]]) -> list[list[int]]:
    return [
        sorted(data["tokens"][sample][0] for sample in row)
        for rows in rows_of(schedule)
        for row in rows
    ]


def test_a_groups_samples_meet_in_a_row_where_prefixes_are_shared() -> None:
    # Two steps: the first four groups' rollouts are not the first step's.
    data = groups(4, 4, 4, 4)
    ids = list(range(16))
    assert any(len(set(row)) > 1 for row in group_sets(split(data, make_config(), ids, 200), data))
    slime.configure(share_prefixes=True)
    # A step has two samples of each group.
    sets = group_sets(split(data, make_config(), ids, 200), data)
    assert all(row.count(group) == 2 for row in sets for group in row)
    # A row holds three of its five samples at most, with a budget that counts each copy.
    data = groups(5, 5)
    ids = [sample[0] * 5 + k // 2 for k, sample in enumerate(data["tokens"])]
    sets = group_sets(split(data, make_config(), ids, 150), data)
    assert sorted(sets) == [[0, 0], [0, 0, 0], [1, 1], [1, 1, 1]]


def test_steps_that_families_do_not_fill_are_planned_without_them() -> None:
    slime.configure(share_prefixes=True)
    data = groups(2, 2)
    # Four ranks need four rows: two samples of a group in two of them.
    sets = group_sets(split(data, make_config(dp=2), list(range(4)), 200), data)
    assert sorted(map(len, sets)) == [1, 1, 1, 1]


def test_ids_of_another_batch_are_not_taken() -> None:
    slime.configure(share_prefixes=True)
    data = groups(2, 2)
    lengths = [len(tokens) + 1 for tokens in data["tokens"]]
    schedule = slime.build_dp_schedule(
        make_args(max_tokens_per_gpu=300),
        make_config(),
        lengths,
        global_batch_size=4,
        rollout_indices=list(range(4)),
    )
    assert sorted(map(len, group_sets(schedule, data))) == [4]


def test_flops_of_experts_and_latent_attention() -> None:
    """By hand, for hidden 16 and 2 heads of 8: attention 2*16*64, gated MLP 2*16*3*ffn."""
    assert flops.model_flops(make_args(hidden_size=None)) is None
    dense = flops.model_flops(make_args())
    assert dense == (2 * (2048 + 96 * 64) + 2 * 16 * 32, 2 * 2.0 * 16)
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 8, "moe_router_topk": 2}
    one_of_two = make_args(**experts, moe_layer_freq=[0, 1])
    moe_layer = 2048 + 96 * 16 + 2 * 16 * 4
    found = flops.model_flops(one_of_two)
    assert found is not None
    assert found[0] == 2048 + 96 * 64 + moe_layer + 1024
    narrow = flops.model_flops(make_args(**experts, moe_layer_freq=[0, 1], moe_latent_size=4))
    assert narrow is not None
    # Experts at a quarter of the width, and two projections.
    assert narrow[0] == found[0] - 96 * 12 + 2 * 2 * 16 * 4
    every_second = flops.model_flops(make_args(**experts, moe_layer_freq=2))
    assert every_second == flops.model_flops(one_of_two)
    latent = make_args(
        multi_latent_attention=True, qk_head_dim=12, qk_pos_emb_head_dim=4, v_head_dim=8
    )
    found = flops.model_flops(latent)
    assert found is not None
    assert found[1] == 2 * 2.0 * 2 * 12


def test_flops_of_a_hybrid_model_are_those_of_its_letters() -> None:
    """A block is two letters, whatever Megatron counts as layers; `|` and `/` are none."""
    blocks = flops.model_flops(make_args())
    assert flops.model_flops(make_args(num_layers=4, hybrid_layer_pattern="*-|*-")) == blocks
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 8, "moe_router_topk": 2}
    one_of_two = flops.model_flops(make_args(**experts, moe_layer_freq=[0, 1]))
    letters = make_args(**experts, num_layers=4, hybrid_layer_pattern="*-*E/*E")
    assert flops.model_flops(letters) == one_of_two
    mamba = {"num_layers": 4, "mamba_head_dim": 4, "mamba_num_groups": 1}
    found = flops.model_flops(make_args(**mamba, hybrid_layer_pattern="M-*-"))
    assert found is not None
    assert blocks is not None
    assert found[1] == blocks[1] / 2
    given = flops.model_flops(make_args(**mamba, hybrid_layer_pattern="M-*-", mamba_num_heads=8))
    assert given == found
    assert flops.model_flops(make_args(hybrid_layer_pattern="K-")) is None


ROLLOUTS = st.lists(st.integers(1, 3), min_size=1, max_size=14)


@settings(max_examples=30)
@given(
    sizes=ROLLOUTS,
    data=st.data(),
    dp=st.sampled_from([1, 2, 3]),
    cp=st.sampled_from([1, 2]),
    interleaved=st.sampled_from([(1, 1), (2, 2), (2, 4)]),
    budget=st.integers(20, 80),
    flags=st.sampled_from([{}, {"balance_data": True}, {"balance_by_flops": True}]),
)
def test_schedules_of_any_rollouts(
    sizes: list[int],
    data: st.DataObject,
    dp: int,
    cp: int,
    interleaved: tuple[int, int],
    budget: int,
    flags: dict[str, bool],
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 100), min_size=sum(sizes), max_size=sum(sizes)))
    config = make_config(dp, cp, *interleaved)
    fewest = first_fit_kept(
        [-(-n // (2 * cp)) * 2 * cp if cp > 1 else n for n in lengths],
        sizes,
        budget * cp,
        dp * interleaved[1],
    )
    try:
        schedule = planned(sizes, lengths, config, max_tokens_per_gpu=budget, **flags)
    except ValueError:
        assert fewest == 0
        return
    assert schedule[3][0] >= fewest
    assert schedule == planned(sizes, lengths, config, max_tokens_per_gpu=budget, **flags)


@settings(max_examples=30)
@given(sizes=ROLLOUTS, dp=st.sampled_from([1, 2, 4]), group=st.sampled_from([1, 2, 3]))
def test_the_longest_prefix_that_divides_is_kept(sizes: list[int], dp: int, group: int) -> None:
    """Each sample fills over half a row and needs its own, so the samples kept must divide."""
    config = make_config(dp=dp, vpp=2, group=group)
    ends = [sum(sizes[:k]) for k in range(1, len(sizes) + 1)]
    kept = max((k for k, end in enumerate(ends, 1) if end % (dp * group) == 0), default=0)
    if kept:
        schedule = planned(sizes, [60] * ends[-1], config, max_tokens_per_gpu=100)
        assert schedule[2:] == ([ends[kept - 1] // dp], [kept])
    else:
        with pytest.raises(ValueError, match="cannot align"):
            planned(sizes, [60] * ends[-1], config, max_tokens_per_gpu=100)


@pytest.mark.parametrize(("ep", "given", "etp"), [(1, 4, 1), (2, None, 4), (2, 4, 4), (8, 1, 1)])
def test_the_layout_has_the_hosts_expert_tensor_parallelism(
    ep: int, given: int | None, etp: int
) -> None:
    """Megatron's default is tp; without expert parallelism it changes no plan."""
    args = SimpleNamespace(
        tensor_model_parallel_size=4,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=given,
    )
    sizes = {"dp_size": 2, "cp_size": 1, "vpp_size": None}
    sizes["microbatch_group_size_per_vp_stage"] = None
    assert layout_of(args, sizes) == Layout(dp=2, tp=4, ep=ep, etp=etp)
