"""Bad calls around a batch: cost models, tokens, fields, packing, weights and objectives."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from megapack import ConfigError, CostModel, DataError, Layout, Measurement, ModelSizes
from megapack.job.data.advantages import SampleReward, group_advantages
from megapack.loss import GRPO, PPO, sample_weights
from megapack.rows.packing import pack_row
from megapack.samples import SampleBatch
from tests.bad_input import Row, row
from tests.bad_input.calls import plan

NAN = math.nan
INF = math.inf


def _cost(words: str, **numbers: Any) -> Row:
    return row(f"cost {words}", partial(CostModel, **numbers), ConfigError, *words.split(" & "))


def _cost_json(name: str, text: str, *words: str) -> Row:
    return row(f"cost JSON {name}", partial(CostModel.from_json, text), ConfigError, *words)


def _measured(name: str, error: Any, *words: str, **changes: Any) -> Row:
    good = Measurement(100, 5000, 2, 0.5, 1.0)
    bad = good._replace(**changes)
    return row(f"measured {name}", partial(CostModel.fit, [good, bad]), error, *words)


SIZES = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "vocab_size": 512,
}

COST_ROWS = [
    _cost("fixed=-1 & at least 0", fixed=-1),
    _cost("per_token=nan & finite", per_token=NAN),
    _cost("backward_ratio=None & number", backward_ratio=None),
    _cost("per_token=10000 & finite", per_token=10**400),
    _cost("stage_weights & mean 1 & divide", stage_weights=(1.0, 2.0)),
    _cost("stage_weights=nan & finite", stage_weights=(1.0, NAN)),
    _cost("stage_weights & 5", stage_weights=5),
    _cost_json("cut off", '{"fixed": 1', "not a cost model in JSON", "char"),
    _cost_json("a list", "[1]", "not a cost model in JSON", "mapping"),
    _cost_json("unknown key", '{"fixd": 1}', "not a cost model in JSON", "fixd"),
    _cost_json("doubled key", '{"fixed": 1, "fixed": 2}', "fixed", "twice"),
    _cost_json("NaN", '{"fixed": NaN}', "fixed=nan"),
    row(
        "measured nothing", partial(CostModel.fit, []), DataError, "0 measurements", "at least one"
    ),
    _measured("in 0 seconds", DataError, "row 1", "0", "positive", forward_seconds=0.0),
    _measured("in NaN seconds", DataError, "row 1", "nan", "positive", forward_seconds=NAN),
    _measured("negative tokens", DataError, "row 1", "-5", row_tokens=-5),
    row(
        "model without layers",
        lambda: ModelSizes(**{**SIZES, "num_layers": 0}),
        ConfigError,
        *("num_layers=0", "at least 1"),
    ),
    row(
        "model on no GPU",
        lambda: CostModel.from_model(ModelSizes(**SIZES), layout=Layout(), flops_per_gpu=0),
        ConfigError,
        *("flops_per_gpu=0", "set"),
    ),
    row(
        "model that does not divide",
        lambda: CostModel.from_model(ModelSizes(**SIZES), layout=Layout(pp=3), flops_per_gpu=1e12),
        ConfigError,
        *("num_layers=4", "pp * vpp = 3", "set pipeline_model_parallel_layout='Et|t*2|tL'"),
    ),
]


def batch(tokens: Any = ((5, 6, 7), (8, 9)), **fields: Any) -> SampleBatch:
    return SampleBatch(tokens, fields)


def _tokens(name: str, tokens: Any, *words: str) -> Row:
    return row(f"tokens {name}", partial(SampleBatch, tokens), DataError, *words)


def _field(name: str, values: Any, *words: str) -> Row:
    return row(f"field {name}", partial(batch, advantages=values), DataError, *words)


BATCH_ROWS = [
    _tokens("no samples", [], "no samples", "give"),
    _tokens("one number", 5, "5", "give"),
    _tokens("empty sample", [[1], []], "sample 1", "leave it out"),
    _tokens("negative", [[1], [2, -7]], "sample 1", "-7", "give"),
    _tokens("float", [[1.0, 2.0]], "sample 0", "float32", "integer"),
    _tokens("bool", [[True]], "sample 0", "bool", "integer"),
    _tokens("complex", [torch.tensor([1 + 2j])], "sample 0", "complex64", "integer"),
    _tokens("text", ["two words"], "sample 0", "give numbers"),
    _tokens("None", [None], "sample 0", "give numbers"),
    _tokens("2-D", [[[1, 2]]], "sample 0", "(1, 2)", "one integer per token"),
    _field("too few", [[1.0]], "'advantages'", "1 values for 2 samples", "give"),
    _field("too long", [[1.0], [1.0, 2.0, 3.0]], "sample 1", "(3,)", "2 tokens", "give"),
    _field("3-D", [[[[1.0]]], [1.0]], "sample 0", "(1, 1, 1)", "give"),
    _field("2-D and 1-D", [[[1.0]], [1.0]], "sample 0", "(3, 1)", "sample 1 has (2,)", "give"),
    _field("NaN", [[1.0], [NAN]], "sample 1", "'advantages'", "nan", "drop"),
    _field("infinite", [-INF, 1.0], "sample 0", "'advantages'", "-inf", "drop"),
    _field("beyond fp32", [1.0, 1e300], "sample 1", "'advantages'", "inf"),
    _field("NaN in bf16", [torch.tensor(NAN).bfloat16(), 0.0], "sample 0", "nan"),
    _field("complex", [1j, 0j], "sample 0", "complex64", "give"),
    _field("None", [[1.0], None], "sample 1", "'advantages'", "give numbers"),
    row(
        "counts of no samples",
        partial(SampleBatch.from_lengths, [], []),
        DataError,
        *("no samples", "give"),
    ),
    row(
        "counts negative",
        partial(SampleBatch.from_lengths, [2, -1], [1, 5]),
        DataError,
        *("sample 1", "-1", "give"),
    ),
    row(
        "counts huge",
        partial(SampleBatch.from_lengths, [2**40], [1]),
        DataError,
        *("sample 0", "1099511627776", "268435456"),
    ),
    row(
        "counts float",
        partial(SampleBatch.from_lengths, [1.5], [1]),
        DataError,
        *("sample 0", "1.5", "give"),
    ),
    row(
        "counts that differ",
        partial(SampleBatch.from_lengths, [2, 3], [1]),
        DataError,
        *("2 prompts for 1 responses", "give"),
    ),
    Row(
        "samples without rewards",
        lambda: group_advantages([SampleReward(group=0, rollout=0)]),
        DataError,
        ("group 0", "neither `reward` nor `advantage`"),
        files={},
    ),
    row(
        "prompts without responses",
        partial(SampleBatch.from_prompt_response, [[1], [2]], [[3]]),
        DataError,
        *("2 prompts for 1 responses", "give"),
    ),
    row(
        "tokens of other lengths",
        lambda: SampleBatch.from_lengths([2], [1]).set_tokens(0, [1], [2]),
        DataError,
        *("sample 0", "2 tokens", "3", "give"),
    ),
    row(
        "a mask of another count",
        lambda: SampleBatch.from_lengths([2], [2], loss_tokens=[1]).set_tokens(0, [1, 2], [3, 4]),
        DataError,
        *("sample 0", "2 tokens count", "1 do", "give the mask"),
    ),
    row(
        "a mask of another length",
        lambda: SampleBatch.from_lengths([2], [2], loss_tokens=[1]).set_tokens(
            0, [1, 2], [3, 4], [1]
        ),
        DataError,
        *("sample 0", "(1,)", "2 tokens", "give"),
    ),
    row(
        "more loss tokens than tokens",
        partial(SampleBatch.from_lengths, [2], [2], loss_tokens=[3]),
        DataError,
        *("sample 0", "3 loss_tokens", "give 0 to 2"),
    ),
    row(
        "loss tokens of other samples",
        partial(SampleBatch.from_lengths, [2], [2], loss_tokens=[1, 1]),
        DataError,
        *("2 loss_tokens", "1 samples", "give"),
    ),
    row(
        "a mask with a hole",
        lambda: SampleBatch.from_padded(torch.ones(1, 3).long(), torch.tensor([[1, 0, 1]])),
        DataError,
        *("row 0", "between 0 and 3", "give"),
    ),
    row(
        "a mask of another shape",
        lambda: SampleBatch.from_padded(torch.ones(1, 3).long(), torch.ones(1, 2)),
        DataError,
        *("(1, 3)", "(1, 2)", "give"),
    ),
    row(
        "a token beyond the vocabulary",
        lambda: pack_row(batch(), plan([3]).steps[0].ranks[0][0], Layout(), vocab_size=7),  # type: ignore[attr-defined]
        DataError,
        *("sample 0", "token id 7", "vocabulary is 7", "give"),
    ),
    row(
        "a row of other samples",
        lambda: pack_row(batch(), plan([9]).steps[0].ranks[0][0], Layout()),  # type: ignore[attr-defined]
        DataError,
        *("3 tokens", "9", "plan with"),
    ),
    row(
        "no response in the step",
        lambda: sample_weights("token-mean", [0] * 8, plan()),  # type: ignore[arg-type]
        DataError,
        *("step 0", "no response token", "8 samples", "give"),
    ),
    row(
        "counts of other samples",
        lambda: sample_weights("token-mean", [1, 2], plan()),  # type: ignore[arg-type]
        DataError,
        *("2", "8 samples", "give"),
    ),
    row(
        "an unknown weighting",
        lambda: sample_weights("mean", [1] * 8, plan()),  # type: ignore[arg-type]
        ConfigError,
        *("'mean'", "token-mean", "set"),
    ),
    row(
        "a norm of NaN",
        lambda: sample_weights("seq-mean-token-sum-norm", [1] * 8, plan(), 0, NAN),  # type: ignore[arg-type]
        ConfigError,
        *("nan", "set"),
    ),
    row("clip NaN", partial(PPO, clip_high=NAN), ConfigError, "clip_high=nan", "set"),
    row("clip below 0", partial(PPO, clip_low=-0.1), ConfigError, "clip_low=-0.1", "set"),
    row("dual clip NaN", partial(PPO, dual_clip=NAN), ConfigError, "dual_clip=nan", "set"),
    row("entropy NaN", partial(PPO, entropy_coef=NAN), ConfigError, "entropy_coef=nan", "set"),
    row("KL infinite", partial(GRPO, kl_coef=INF), ConfigError, "kl_coef=inf", "set"),
    row("KL unknown", partial(GRPO, kl_kind="k4"), ConfigError, "'k4'", "k1, k2, k3", "set"),
]

ROWS = COST_ROWS + BATCH_ROWS
