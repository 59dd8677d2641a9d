"""Bad calls of the planner: lengths, ids, budgets, policies and layouts."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from megapack import (
    ConfigError,
    CostModel,
    DataError,
    Layout,
    PlanError,
    Policy,
    build_dp_schedule,
    check_plan,
)
from tests.bad_input import Row, row

SIZES = ("dp", "tp", "pp", "vpp", "cp", "ep")
LENGTHS = [5, 9, 3, 7, 2, 8, 4, 6]
NAN = math.nan
INF = math.inf


def plan(lengths: Any = LENGTHS, layout: Any = None, **settings: Any) -> object:
    """Plan samples; the default is a budget of 64 tokens per GPU."""
    if "micro_batch_size" not in settings:
        settings.setdefault("max_tokens_per_gpu", 64)
    return build_dp_schedule(lengths, layout=layout or Layout(dp=2), **settings)


def array(values: Any, dtype: str) -> np.ndarray:
    return np.array(values, dtype=dtype)


def _lengths(name: str, lengths: Any, *words: str) -> Row:
    return row(f"lengths {name}", partial(plan, lengths), DataError, *words)


LENGTH_ROWS = [
    _lengths("none", None, "None", "integer per sample"),
    _lengths("empty", [], "(0,)", "at least one"),
    _lengths("0", [5, 0], "sample 1", "length 0", "[1, 268435456]"),
    _lengths("negative", [5, -3], "sample 1", "length -3"),
    _lengths("too long", [2**28 + 1], "sample 0", "268435457"),
    _lengths("10^30", [5, 10**30], "sample 1", "268435456"),
    _lengths("unsigned 2^64 - 1", array([5, 2**64 - 1], "uint64"), "sample 1", "18446744073709"),
    _lengths("NaN", [5, NAN], "sample 1", "nan", "integer"),
    _lengths("float", [5.0], "sample 0", "5.0", "integer"),
    _lengths("bool", [True], "sample 0", "True", "integer"),
    _lengths("string", ["5"], "sample 0", "'5'", "integer"),
    _lengths("nested", [[5], [6]], "sample 0", "integer"),
    _lengths("one number", 5, "5", "integer per sample"),
    _lengths("2-D", array([[5, 6]], "int64"), "(1, 2)", "one integer per sample"),
    _lengths("0-D", array(5, "int64"), "()", "one integer per sample"),
    _lengths("array of floats", array([5, 6], "float32"), "float32", "give integers"),
    _lengths("array of bools", array([True], "bool"), "bool", "give integers"),
    _lengths("array of dates", array(["2024-01-01"], "datetime64[D]"), "datetime64"),
]


def _ids(name: str, words: tuple[str, ...], **ids: Any) -> Row:
    return row(f"ids {name}", partial(plan, **ids), DataError, *words)


ID_ROWS = [
    _ids("too few", ("3 rollout_ids for 8 samples", "one per sample"), rollout_ids=[1, 2, 3]),
    _ids("too many", ("9 colocate_ids for 8",), colocate_ids=range(9)),
    _ids("one number", ("rollout_ids are 5", "give"), rollout_ids=5),
    _ids("None inside", ("sample 1", "None", "int64 or a str"), rollout_ids=["a", None] * 4),
    _ids("float", ("sample 7", "1.5"), rollout_ids=[1, 2, 3, 4, 5, 6, 7, 1.5]),
    _ids("bool", ("sample 0", "True"), rollout_ids=[True] * 8),
    _ids(
        "a colocated set in two rollouts",
        ("samples 0 and 1", "'a'", "1 and 2", "one rollout id"),
        rollout_ids=[1, 2, 3, 4, 5, 6, 7, 8],
        colocate_ids=["a", "a", "b", "b", "c", "c", "d", "d"],
    ),
]


def _settings(name: str, error: Any, *words: str, **settings: Any) -> Row:
    return row(f"plan {name}", partial(plan, **settings), error, *words)


PLAN_ROWS = [
    row(
        "plan neither budget",
        partial(build_dp_schedule, LENGTHS, layout=Layout()),
        ConfigError,
        *("neither of max_tokens_per_gpu and micro_batch_size", "set max_tokens_per_gpu=9 or more"),
    ),
    _settings("both budgets", ConfigError, "both of", max_tokens_per_gpu=8, micro_batch_size=2),
    *(
        _settings(
            f"budget {value!r:.9}", ConfigError, word, "set an integer", max_tokens_per_gpu=value
        )
        for value, word in [
            (0, "max_tokens_per_gpu=0"),
            (16.0, "=16.0"),
            ("16", "='16'"),
            (10**30, "1099511627776"),
        ]
    ),
    _settings(
        "budget below the alignment",
        ConfigError,
        *("max_tokens_per_gpu=1", "16", "set"),
        layout=Layout(cp=8, fp8=True),
        max_tokens_per_gpu=1,
    ),
    _settings("micro-batches of 0", ConfigError, "micro_batch_size=0", micro_batch_size=0),
    _settings("steps of 0", ConfigError, "global_batch_size=0", "set", global_batch_size=0),
    _settings("0 steps", ConfigError, "num_steps=0", num_steps=0),
    _settings("more steps than rollouts", PlanError, "num_steps=9", "8", num_steps=9),
    _settings("steps twice", ConfigError, "set one", num_steps=2, global_batch_size=4),
    _settings(
        "a sample over the budget",
        PlanError,
        *("1 sample(s)", "sample 1", "9 tokens", "raise max_tokens_per_gpu"),
        max_tokens_per_gpu=8,
        policy=Policy(oversize="error"),
    ),
    *(
        _settings(
            f"more ranks than samples, {policy}",
            PlanError,
            *("16", "8"),
            layout=Layout(dp=16),
            policy=Policy(**policy),
        )
        for policy in (
            {"unreachable": "error"},
            {"unreachable": "drop"},
            {"unreachable": "error", "count_rule": "multiple"},
            {"unreachable": "drop", "row_shape": "uniform"},
        )
    ),
    _settings(
        "weights of another pipeline",
        ConfigError,
        *("2 stage_weights", "pp*vpp=1", "give"),
        cost=CostModel(per_token=1.0, stage_weights=(1.0, 1.0)),
    ),
    row(
        "policy search 10^30",
        partial(Policy, search=10**30),
        ConfigError,
        *("search=1", "at most 1099511627776"),
    ),
    row("policy search 1.5", partial(Policy, search=1.5), ConfigError, "search=1.5", "integer"),
    row("policy unknown", partial(Policy, balance="flops"), ConfigError, "'flops'", "'time'"),
    row("policy list", partial(Policy, oversize=["alone"]), ConfigError, "['alone']", "set one of"),
    row(
        "policy no live tokens",
        partial(Policy, max_live_tokens_per_gpu=0),
        ConfigError,
        *("max_live_tokens_per_gpu=0", "at least 1"),
    ),
    Row(
        "check with other lengths",
        lambda: check_plan(plan(), LENGTHS[:3]),  # type: ignore[arg-type]
        PlanError,
        ("3 lengths", "8 samples"),
        files={},
    ),
]


def _layout(words: str, **sizes: Any) -> Row:
    return row(f"layout {words}", partial(Layout, **sizes), ConfigError, *words.split(" & "))


LAYOUT_ROWS = [
    *(
        _layout(f"{name}=0 & at least 1", **{name: 0})
        for name in ["dp", "tp", "pp", "vpp", "cp", "ep"]
    ),
    _layout("dp=-2 & at least 1", dp=-2),
    _layout("tp=2.0 & at least 1", tp=2.0),
    _layout("etp=1.0 & at least 1", etp=1.0),
    _layout("dp=10000 & at most 1048576", dp=10**30),
    _layout("vpp=2 with pp=1 & set pp > 1", vpp=2),
    _layout("microbatch_group_size=2 & below pp=4 & set 4", pp=4, vpp=2, microbatch_group_size=2),
    _layout("microbatch_group_size=4 with vpp=1 & leave it out", pp=4, microbatch_group_size=4),
    _layout("microbatch_group_size=0", pp=2, vpp=2, microbatch_group_size=0),
    _layout("ep=3 & dp*cp*tp=4 & set ep", dp=4, ep=3),
    _layout("etp=3 does not divide tp=4 & set etp to 1 or tp", tp=4, etp=3),
    _layout("etp*ep=2*4 & dp*cp*tp=4 & set ep to a divisor of 2", dp=2, tp=2, ep=4, etp=2),
    _layout("fp8='e4m3' & mxfp8", fp8="e4m3"),
    _layout("sequence_parallel='yes' & True", sequence_parallel="yes"),
]


ROWS = LENGTH_ROWS + ID_ROWS + PLAN_ROWS + LAYOUT_ROWS
