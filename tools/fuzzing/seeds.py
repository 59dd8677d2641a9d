"""Valid documents from which the fuzz targets start."""

from __future__ import annotations

import json
import re
import zlib
from functools import cache
from pathlib import Path
from typing import Any

from megapack import Layout, Plan, Policy, SharedPrefixes, build_dp_schedule
from tests.unit.job.config.hybrid_configs import HYBRID
from tests.unit.job.config.published_configs import CONFIGS as CONFIGS_OF_FAMILIES
from tests.unit.job.config.published_configs import FAMILY_MODELS

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def seed_length(sample: int) -> int:
    """Tokens of this sample in every seed plan; mutated plans are checked against them."""
    return 1 + 37 * sample % 61


@cache
def plans() -> tuple[Plan, ...]:
    """Small plans with various layouts, budgets, ids and policies."""

    def plan(num_samples: int, layout: Layout, **settings: object) -> Plan:
        lengths = [seed_length(sample) for sample in range(num_samples)]
        if "micro_batch_size" not in settings:
            settings["max_tokens_per_gpu"] = 80
        return build_dp_schedule(lengths, layout=layout, **settings)  # type: ignore[arg-type]

    ids = [0, 0, 1, 1]
    return (
        plan(1, Layout()),
        plan(4, Layout(dp=2, pp=2, vpp=2), num_steps=2),
        plan(4, Layout(dp=2, cp=2, tp=2, sequence_parallel=True), micro_batch_size=2),
        plan(4, Layout(dp=2), rollout_ids=ids),
        plan(4, Layout(pp=2, vpp=2, microbatch_group_size=3), colocate_ids=ids, forward_only=True),
        plan(
            9,
            Layout(dp=4, pp=2, vpp=2),
            rollout_ids=list("aabbccdde"),
            policy=Policy(unreachable="drop", row_shape="uniform"),
        ),
        plan(3, Layout(dp=2, ep=2), policy=Policy(oversize="alone", search=0)),
        plan(4, Layout(cp=2), prefixes=SharedPrefixes((1, 3), (0, 35))),
        plan(1, Layout(dp=2), policy=Policy(row_shapes=2)),
        plan(9, Layout(dp=2, pp=2), policy=Policy(row_shapes=2, backward="split")),
        plan(4, Layout(), prefixes=SharedPrefixes((1, 3, 2), (0, 35, 12))),
    )


def plan_json() -> list[bytes]:
    """The plans as JSON."""
    return [plan.to_json().encode() for plan in plans()]


def configs() -> list[bytes]:
    """A shipped config, each of its sections as a small document, and one with overrides.

    Overrides follow the document, each after a NUL byte.
    """
    text = (CONFIGS / "gpt_tiny_dp2_pp2_vpp2_cpu.yaml").read_text()
    minimal = "name: a\nplan: {max_tokens_per_gpu: 64}\n"
    sections = re.findall(r"^(?!name|plan)\w.*\n(?: .*\n)*", text, re.MULTILINE)
    small = [minimal, *(minimal + section for section in sections)]
    flow = (
        "name: a\ntrain: {trackers: [wandb], resume: auto}\noptim: {lr: 1e-5}\0plan.search=0\0"
        "plan.micro_batch_size=2\0model.freeze=['embedding.*']"
    )
    return [document.encode() for document in (*small, flow, text)]


def hf_configs() -> list[bytes]:
    """The published config.json of each family, each key as a piece; one as a file."""
    published = [CONFIGS_OF_FAMILIES[name] for name in FAMILY_MODELS.values()]
    documents = [*published, *HYBRID.values()]
    pieces = [
        "".join(f"\0{key}={json.dumps(value)}" for key, value in keys.items()) for keys in documents
    ]
    return [one.encode() for one in (*pieces, json.dumps(documents[0], indent=1))]


def chats() -> list[bytes]:
    """Lines of chats and of pairs of chats that every template writes in full."""
    user = {"role": "user", "content": "a"}
    turn = {"role": "assistant", "content": "b c"}
    function = {"name": "f", "arguments": '{"x": 1, "y": "z"}'}
    rows: list[dict[str, Any]] = [
        {"messages": [user, turn, user, turn]},
        {"messages": [user, {**turn, "weight": 0}, user, {**turn, "train": True}]},
        {"prompt": "a", "chosen": [user, turn], "rejected": [user, {**turn, "content": "d"}]},
        {"prompt": [user], "messages": [turn], "chat_template_kwargs": {}, "reward": 1},
    ]
    rows = [{**row, "group": group} for row in rows for group in range(4)]
    call = {**turn, "tool_calls": [{"type": "function", "function": function}]}
    result = {"role": "tool", "content": "r"}
    called = [{"messages": [user, call, result, turn], "group": group} for group in range(16)]
    lines = [json.dumps(row).encode() for row in (*rows, *called)]
    # Phi-3's has no calls.
    return [line for line in lines if b"tool_calls" not in line or zlib.crc32(line) % 4 != 2]


def rollouts() -> list[bytes]:
    """JSON Lines with every kind of rollout, and files of lengths."""
    text = {"prompt": "2+2=", "response": "4"}
    ids = {"prompt_ids": [5, 6], "response_ids": [7]}
    rows = [{**text, "group": 0, "rollout": r, "reward": r * 0.5} for r in range(3)]
    rows += [{**ids, "group": "a", "advantage": -0.5}, {**ids, "reward": 1, "length": 3}]
    rows += [{**ids, "loss_mask": [1], "routed_experts": [[[0, 1]], [[2, 3]]]}]
    rows += [{"prompt": "a", "chosen": "b", "rejected": "c", "reward": 3}]
    rows += [{"prompt_ids": [], "chosen_ids": [1, 2], "rejected_ids": [3, 4]}]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows += [
        {"messages": turns * 2, "tools": "[]"},
        {"chosen": turns, "rejected": [turns[0], {**turns[1], "content": "cdd"}]},
    ]
    lines = [json.dumps(row) for row in rows]
    return [
        "\n".join(lines[:3]).encode(),
        "\n\n".join(lines).encode() + b"\n",
        *(line.encode() + b"\n" for line in lines),
        b"17\n2\n300\n",
        b'prompt_len,response_len,group\n3,4,a\n5,0,"b"\n',
        b'{"input_ids": [1, 2, 3]}\n{"input_ids": [4]}\n',
    ]
