"""Megatron-LM's own `pretrain_gpt.py`, whole, on the CPU: its arguments, data, loop and optimizer.

Cases, joined by +:

    (none)      mock data
    experts     four experts with aux_loss
    sequence    the same with seq_aux_loss in place of aux_loss
    free        experts without that loss
    single      rows of one item in place of two: --micro-batch-size 1
    each        experts balance their load over each sample (PlannedStep's aux_loss)
    documents   documents shorter than a row, --reset-position-ids and --reset-attention-mask
    sft         conversations packed into rows, with cu_seqlens
    flat        Megatron-LM's cu_seqlens without the dimension of the batch, which rotary embeddings
                need, unfused and fused; 0.16.1 gives it to them
    mtp         one depth of multi-token prediction
    spec        the layer spec for packed rows; cp > 1 and sft need it without Transformer Engine
    kept        config.deallocate_pipeline_outputs=False

In a job with Transformer Engine the flags of layers and fusions are Megatron-LM's defaults.
"""

from __future__ import annotations

import itertools
import os
import runpy
import shutil
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megapack import Layout, cpu, patching
from tests.hosts.steps import job
from tests.te_python import runs_te
from tests.toy import width_of
from tools.hosting import import_stubs

BUDGET = 200
NUM_LAYERS = 4
VOCAB_SIZE = 127
ARGUMENTS = (
    f"--num-layers 4 --hidden-size {width_of(64)} --num-attention-heads 4 --seq-length 64 "
    "--use-cpu-initialization --max-position-embeddings 1024 --global-batch-size 16 "
    "--lr 1e-3 --lr-decay-style constant "
    "--weight-decay 0 --clip-grad 1.0 --tokenizer-type NullTokenizer --vocab-size 127 "
    "--attention-dropout 0 --hidden-dropout 0 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --log-interval 1 --eval-iters 1 "
    "--eval-interval 100 --num-workers 0 --calculate-per-token-loss --split 900,50,50"
)
# Megatron-LM's defaults are Transformer Engine's layers, and kernels that it or CUDA has.
WITHOUT_TE = (
    "--transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm "
    "--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion "
    "--no-bias-swiglu-fusion"
)
CASES = {
    "experts": "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --ffn-hidden-size 64",
    "sequence": "--moe-router-load-balancing-type seq_aux_loss",
    "free": "--moe-aux-loss-coeff 0",
    "strong": "--moe-aux-loss-coeff 1000",
    "documents": "--reset-position-ids --reset-attention-mask --eod-mask-loss",
    "sft": "--sft --no-create-attention-mask-in-dataloader",
    "mtp": "--mtp-num-layers 1",
    "spec": "--spec megapack.job.gpt.specs packed_layer",
}


def arguments(layout: Layout, cases: list[str], steps: int, folder: Path) -> list[str]:
    """The command line of pretrain_gpt.py."""
    given = [*ARGUMENTS.split(), "--train-iters", str(steps)]
    if not runs_te():
        given += WITHOUT_TE.split()
    for case in cases:
        given += CASES.get(case, "").split()
    given += ["--micro-batch-size", "1" if {"sft", "single"} & {*cases} else "2"]
    given += ["--tensor-model-parallel-size", str(layout.tp)]
    given += ["--pipeline-model-parallel-size", str(layout.pp)]
    if layout.vpp > 1:
        layers = NUM_LAYERS // (layout.pp * layout.vpp)
        given += ["--num-layers-per-virtual-pipeline-stage", str(layers)]
    if layout.cp > 1:
        given += ["--context-parallel-size", str(layout.cp)]
        # The default is p2p, a ring.
        given += [] if runs_te() else ["--cp-comm-type", "all_gather"]
    if "sft" in cases:
        return [*given, "--data-path", str(folder / "conversations.jsonl")]
    if "documents" in cases:
        given += ["--data-cache-path", str(folder / "cache")]
        return [*given, "--data-path", str(folder / "documents")]
    return [*given, "--mock-data"]


def write_documents(folder: Path) -> None:
    """Megatron-LM's own data format: 400 documents of 6 to 40 tokens, each ended by EOD."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(folder / "documents.bin"), dtype=np.int32)
    draw = np.random.default_rng(7)
    for length in draw.integers(6, 41, size=400):
        tokens = np.append(draw.integers(1, VOCAB_SIZE, size=length - 1), VOCAB_SIZE)
        builder.add_document(torch.from_numpy(tokens), [len(tokens)])
    builder.finalize(str(folder / "documents.idx"))


def conversations() -> list[dict[str, Any]]:
    """Rows of two or three conversations; a message is its token ids."""
    draw = np.random.default_rng(8)

    def message(role: str, most: int) -> dict[str, str]:
        tokens = draw.integers(1, VOCAB_SIZE, size=draw.integers(2, most))
        return {"role": role, "content": " ".join(map(str, tokens))}

    return [
        {
            "messages": [
                message(role, most)
                for _ in range(draw.integers(2, 4))
                for role, most in (("system", 4), ("user", 6), ("assistant", 9))
            ]
        }
        for _ in range(200)
    ]


def tokenize_conversation(self: Any, messages: Any, *_: Any, **__: Any) -> Any:
    """Token ids and targets, -100 where a user or the system speaks."""
    import torch

    tokens = [[int(token) for token in message["content"].split()] for message in messages]
    targets = [
        part if message["role"] == "assistant" else [-100] * len(part)
        for part, message in zip(tokens, messages, strict=True)
    ]
    return tuple(torch.tensor([*itertools.chain(*parts)]) for parts in (tokens, targets))


def stub_conversations() -> None:
    """Hugging Face's loader and a tokenizer with a chat template need packages of their own."""
    from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText

    rows = conversations()
    loader = types.ModuleType("datasets")
    loader.load_dataset = lambda *_, **__: rows  # type: ignore[attr-defined]
    sys.modules["datasets"] = loader
    MegatronTokenizerText.tokenize_conversation = tokenize_conversation
    MegatronTokenizerText.pad = property(lambda self: 0)


def script(source: Path, folder: Path, planned: str) -> Path:
    """Megatron-LM's scripts in a folder of this rank, with the patch's lines added or not.

    megatron.core comes from the installed package, whose parts in C++ are compiled.
    """
    tree = folder / f"tree{os.environ['RANK']}"
    (tree / "megatron").mkdir(parents=True)
    for part in (source / "megatron").iterdir():
        if part.name != "core":
            (tree / "megatron" / part.name).symlink_to(part)
    for path in source.glob("*.py"):
        shutil.copy(path, tree)
    path = tree / "pretrain_gpt.py"
    start = 'if __name__ == "__main__":\n'
    text = path.read_text()
    assert start in text
    path.write_text(text.replace(start, start + planned))
    return path


def planned_lines(cases: list[str]) -> str:
    """What `megapack patch diff megatron_lm` adds below `__main__`."""
    aux_loss = "per_sequence" if "each" in cases else "as_set"
    return (
        "    from megapack.hosts import megatron_lm\n"
        "    forward_step = megatron_lm.PlannedStep("
        f"max_tokens_per_gpu={BUDGET}, aux_loss={aux_loss!r})\n"
    )


def once(folder: Path, name: str, work: Callable[[Path], None]) -> None:
    """Let the first rank do something; the others wait for it."""
    done = folder / f"{name}.done"
    if os.environ["RANK"] == "0":
        work(folder)
        done.touch()
    while not done.exists():
        time.sleep(0.05)


def watch(report: job.Report) -> None:
    """Report what Megatron-LM's own loop and evaluation return."""
    from megatron.training import training

    train_step = training.train_step
    evaluate = training.evaluate
    models: list[Any] = []

    def watched_step(
        forward_step: Any, iterator: Any, model: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not models:
            models.extend(model)
            count_rows(report, model[0])
        report.row_tokens.append([])
        result = job.timed(
            report, lambda: train_step(forward_step, iterator, model, *args, **kwargs)
        )
        report.num_microbatches.append(len(report.row_tokens[-1]))
        report.losses += [float(loss) for name, loss in result[0].items() if name == "lm loss"]
        report.more.setdefault("logged", []).append({k: float(v) for k, v in result[0].items()})
        report.grad_norms.append(float(result[5]))
        params = [param for chunk in models for param in chunk.parameters()]
        report.params_sum = float(sum(param.detach().double().abs().sum() for param in params))
        return result

    def watched_evaluate(*args: Any, **kwargs: Any) -> Any:
        report.row_tokens.append([])
        result = evaluate(*args, **kwargs)
        report.row_tokens.pop()
        losses = {name: float(loss) for name, loss in (result[0] or {}).items()}
        report.more.setdefault("evaluated", []).append(losses)
        return result

    training.train_step = watched_step
    training.evaluate = watched_evaluate


def count_rows(report: job.Report, chunk: Any) -> None:
    """Note the tokens of each row that the chunk is given in a step."""

    def note(module: Any, args: Any, kwargs: Any) -> None:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        report.row_tokens[-1].append(0 if tokens is None else tokens.numel())

    chunk.register_forward_pre_hook(note, with_kwargs=True)


def keep_outputs() -> None:
    """Megatron-LM has no argument for config.deallocate_pipeline_outputs."""
    from megatron.training import arguments

    make = arguments.core_transformer_config_from_args

    def keeping(*args: Any, **kwargs: Any) -> Any:
        config = make(*args, **kwargs)
        config.deallocate_pipeline_outputs = False
        return config

    arguments.core_transformer_config_from_args = keeping


def flatten_cu_seqlens() -> None:
    """[1, n] -> [n], where Megatron-LM makes a row's description."""
    from megatron.core import utils

    describe = utils.get_thd_batch_on_this_cp_rank

    def flat(batch: Any, cu_seqlens: Any, padded: Any, max_seqlen: Any, *args: Any) -> Any:
        padded = cu_seqlens if padded is None else padded
        return describe(batch, cu_seqlens.flatten(), padded.flatten(), max_seqlen, *args)

    utils.get_thd_batch_on_this_cp_rank = flat


def main() -> None:
    """Run the script with the patches, and write this rank's report."""
    given = job.parse_arguments()
    cases = [case for case in given.case.split("+") if case]
    import_stubs.install("six")
    cpu.enable()
    planned = planned_lines(cases) if "megatron_lm" in given.patches else ""
    source = job.import_host("megatron_lm")
    sys.path.remove(str(source))
    path = script(source, given.folder, planned)
    sys.path.insert(0, str(path.parent))
    patching.apply(*given.patches)
    report = job.Report()
    watch(report)
    job.count_shape_exchanges(report)
    if "kept" in cases:
        keep_outputs()
    if "documents" in cases:
        once(given.folder, "documents", write_documents)
    if "sft" in cases:
        stub_conversations()
    if "flat" in cases:
        flatten_cu_seqlens()
    sys.argv[:] = [str(path), *arguments(given.layout, cases, given.steps, given.folder)]
    runpy.run_path(str(path), run_name="__main__")
    job.write(report, given.folder)


if __name__ == "__main__":
    main()
