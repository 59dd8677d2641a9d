"""What the files of planner tables say above their tables: docs/measured/planner_NAME.md."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """A file of tables."""

    title: str
    what: str
    """What was measured and what the columns are."""


_RATIO = "[Time over equal work](../planner.md), by the simulator."
_STRATEGIES = """\
The other strategies are reimplementations (`megapack/outlook/baselines.py`): `next_fit`
(Megatron-LM), `first_fit_flops` and `kk_flops` (slime under `--balance-data` and
`--balance-by-flops`), `mffd` (NeMo-RL) and `kk_per_rank` (verl). `*`: rows over the budget."""

# By the option that writes the file alone, --only-NAME.
PARTS = {
    "common": Part(
        "Plans by layout, beside other schedulers",
        f"""{_RATIO} Geometric means of five traces of lengths and two cost models. Columns of
Megatron's dev branch are its own schedulers, from its sources. Megatron-LM, slime, NeMo-RL and
verl are reimplementations of what these hosts do (`megapack/outlook/baselines.py`); of slime's
`--balance-data` and `--balance-by-flops` each cell has the better. `megapack` is the default
policy, `dynamic CP` is `context_parallel: dynamic`, and `everything` adds `split_samples: auto` and
`backward: split`. Second table: in each cell the others have the best of five budgets, from the
first table's down to a quarter of it, or to the longest sample. Rows over the budget are over that
of the first table.""",
    ),
    "published": Part(
        "Plans for inputs that others published",
        """Inputs that others published, with their own code where it plans. Megatron-LM's example
of dynamic CP (`examples/dynamic_context_parallel`, dev branch): `measured` are its trimmed means,
fixed CP then dynamic CP; `simulated` are its plans under our model of an H100. WLB-LLM's and
ProLong's documents, as DistCA publishes them: the first 512 documents of at most 131,072 tokens,
rows of 131,072 tokens, time over equal work, `*` marks rows over the budget. DynaPipe: 16
micro-batches on 4 stages, its two schedules by its own code, time over equal work. miles#1766:
128 samples with 7,385,297 tokens on TP8 x PP8 x CP2; their lengths are not published, and these
are lognormal with that sum.""",
    ),
    "costs": Part(
        "What the terms of the cost model change in plans",
        """Plans of two cost models, both judged by ours, which knows what attention's kernels
take for short samples and what rows over several ranks exchange. `squares` counts squared tokens
alone, with 5 % of a token for each further rank of a row. `context_parallel: dynamic`,
`split_samples: auto`, 256 samples.""",
    ),
    "shapes": Part(
        "Rows of few lengths",
        """Plans under `row_shapes: k` beside plans with rows of any length, for the second half
of up to 1,024 samples. A cell has the step's simulated seconds over those of rows of any length,
the padding of rows in percent of real tokens, and the break-even: what CUDA graphs must save of
each micro-batch's fixed cost, in tokens of the model's forward.""",
    ),
    "steps": Part(
        "Steps of equal work",
        """Batches of 128 shuffled samples under `data.balance_window` w, in which w batches
exchange samples until their work is about equal. First table: the standard deviation over the
steps of an epoch, in percent of the mean, of the steps' work, of their work if batches are even
by tokens, and of simulated seconds, with the mean seconds of a step over those at w=1. Second
table: the standard deviation of a batch's number of long samples (the longest tenth), and the
mean length of samples in a batch with one of the longest hundredth over that of all others.
Default policy, 30B-A3B.""",
    ),
    "hybrid": Part(
        "Plans for hybrid models",
        f"""{_RATIO} Steps of up to 256 samples; sizes and the first layout of each model are
those of the shipped configs. `one weight`: the planner knows one weight per stage; `fixed`: it
also knows that stages have other shares of attention. Both are timed with what stages really
take.""",
    ),
    "images": Part(
        "Plans for models with images",
        f"""{_RATIO} Each different image is a part of that work once. A step is 512 samples, prompt
groups of 8 with the same images (`tools/benching/image_traces.py`); H100, the tower trained.
Megatron-LM, verl and slime: their rows, at the best of five budgets, which encode their images on
the first stage, on each of its TP ranks. The same for rows of megapack's that are balanced by
tokens (`by tokens`) and with the seconds of images (`by cost`, `Policy(images="row")`), and where
TP ranks share a row's images (`over TP`). `ahead`: each image once, on one of all GPUs; `shared`:
with shared prefixes too; `images' part`: of the time of `ahead`, what is before and after the rows.
Second table, Qwen3-VL-8B on dp4 tp2 pp4: different images and their uses, patches of the busiest
GPU over the mean, GiB of features that a rank of the first stage gets, and holds with their
gradients, without and with shared prefixes. Third table: the fastest layout that fits into 76 GiB
on charts, with full recomputation, one chunk per stage and shared prefixes; 64, 512 and 1,024
prompts; memory of the fullest GPU, tokens per second and GPU, and the images' part.""",
    ),
    "bound": Part(
        "Distance to a lower bound",
        f"""{_RATIO} The default policy beside what no plan of whole samples in Megatron's order
can beat (`tools/benching/lower_bound.py`). Steps of up to 512 samples. Second table: the cells
that are further from the bound than 1.03, with a hundred times as many evaluations.""",
    ),
    "operations": Part(
        "Split samples and split backwards",
        f"""{_RATIO} `fixed` is the default policy, `both` is `split_samples: auto` with
`backward: split`, and `all three` adds `context_parallel: dynamic`. `M`, `pieces` (rows that hold
one), `live` (most tokens whose activations a GPU holds, over those of `fixed`) and `CPU ms` are
those of `both`. `bound` is what no plan can beat with any planning option
(`tools/benching/ramp_bound.py`), `distance` that of `all three` to it.""",
    ),
    "dynamic": Part(
        "Rows over several DP ranks",
        f"""{_RATIO} `fixed` is the default policy, `dynamic CP` is `context_parallel: dynamic`;
`M` and `wide rows` are its own, and `3x2 1x4` are three rows over two ranks and one over four. A
token of a row over several ranks costs 5 % more for each further rank. {_STRATEGIES} Spread of
step times: the standard deviation of the simulated seconds of 200 steps of 128 samples, in
percent of the mean; `equal work` is the spread of the work itself, which no packing changes.""",
    ),
    "families": Part(
        "Families of shared prefixes in pieces",
        """Steps of 256 samples whose families are larger than a row, with `split_samples: auto`
over `off`: simulated seconds, those with split backwards in both, and tokens that rows hold. `M`
and `ms` (CPU time of planning) are without pieces, then with them. Prompts and answers are
log-uniform from a seed: 16,000 to 28,000 and 500 to 4,000 tokens (documents), 8,000 to 24,000 and
2,000 to 8,000 (long answers), 2,000 to 16,000 and 200 to 2,000 (agentic). Budget 32,768 tokens,
of `half a budget` 16,384. Model 7B.""",
    ),
    "shared": Part(
        "Shared prefixes",
        """How many times as fast a step is in the simulator with shared prefixes as without, at
the same budget and search. `tokens` are real tokens over those that rows hold. `M` and `ms` (CPU
time of planning) are without prefixes, then with them. Lengths of `math`, `agentic`, `trees` and
`turns` are generated from a seed (`tools/benching/planner_families.py`), `math500` and `aime24` are
traces. What a second call of the attention kernel costs is not counted.""",
    ),
    "peers": Part(
        "Plans by trace and layout, beside other strategies",
        f"""{_RATIO} `search=0` is a plan built without simulating, `megapack` the default policy,
to which `M`, `over` (rows over the budget) and `ms` (CPU time of planning) belong. {_STRATEGIES}
`verl` is the installed package's own partitioner.""",
    ),
    "speed": Part(
        "Planning time",
        """CPU time of a plan: medians after the first call. Lengths are lognormal from a seed
(`tools/benching/planner_speed.py`): most between 600 and 5,000 tokens with rows of 32,768 tokens,
or, for planning options other than `fixed`, most between 1,000 and 13,000 with rows of 16,384.
Last table: simulated seconds of steps on large layouts.""",
    ),
}
