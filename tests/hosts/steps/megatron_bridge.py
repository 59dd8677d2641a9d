"""Megatron-Bridge's own SFT recipe, from a tiny Hugging Face folder and packed data.

    torchrun --nproc-per-node 2 -m tests.hosts.steps.megatron_bridge OUT --layout pp=2 --steps 2

The recipe is Bridge's `qwen2_500m_sft_config`; its model, paths and sizes are set as a user would.
What only this host has, in `--case`, separated by commas:

    planned     with the patch, the forward step is a `PlannedStep`
    hostpacks   the patched host packs with its own packer, so that steps have the same samples
    finetune    `finetune` from a checkpoint that Bridge imports from the folder, and save another
    crossing    rows without sample bounds are attended to as one sample, as on a GPU
    images      Bridge's own Qwen3-VL and forward step, in place of the recipe's
    reference   with images, also run `bridge_images.one_sample_step`, on one rank
    unpatched   with images, the provider as it is: it does not hand on the stage's number
    overlap     Bridge's own setting for interleaved stages, `overlap_p2p_comm`
"""

from __future__ import annotations

import functools
import json
import os
import random
import string
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megapack import Layout, patching
from megapack.hosts import megatron_bridge
from tests.hosts.steps import bridge_images, images, job
from tests.te_python import runs_te
from tools.hosting import import_stubs, sources

SEQ_LENGTH = 64
GLOBAL_BATCH = 4
NUM_SAMPLES = {"training": 96, "validation": 24}
# A planned sample has one token more than a packed one: its last label.
BUDGET = 80

# What Bridge imports beside its release, and psutil for the checkpoints of Megatron-Core.
_PACKAGES = (
    *("einops==0.8.1", "omegaconf==2.3.0", "antlr4-python3-runtime==4.9.3"),
    "psutil==7.1.0",
)
_TE = ("transformer_engine", "transformer_engine_torch", "nvdlfw_inspect")
_STUBS = (
    *("mamba_ssm", "causal_conv1d", "fla"),
    *("modelopt", "nvidia_resiliency_ext", "nemo_run", "megatron.energon"),
    *("wandb", "mlflow", "tensorboard", "google", "six", "datasets", "hydra"),
    *("qwen_vl_utils", "timm", "open_clip", "triton"),
)


def import_bridge() -> None:
    """Put Bridge's release on the import path, with stand-ins for what a CPU does not have."""
    for requirement in (sources.release("megatron_bridge"), *_PACKAGES):
        sys.path.insert(0, str(sources.installed(requirement)))
    # Before the stand-ins: these ask for some of them, and would take them for the real packages.
    import psutil
    import torch._inductor.compile_fx  # noqa: F401
    import transformers  # noqa: F401
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter  # noqa: F401
    from megatron.core.extensions import transformer_engine  # noqa: F401
    from megatron.core.models.gpt import gpt_layer_specs  # noqa: F401
    from megatron.core.optimizer import distrib_optimizer  # noqa: F401

    # The process that forks the ranks imported it before psutil was on the path.
    vars(filesystem_async).update(psutil=psutil, HAVE_PSUTIL=True)
    import_stubs.install(*_STUBS, *(() if runs_te() else _TE))


def redirect_to_cpu() -> None:
    """What Bridge asks of CUDA beside what `megapack.cpu` sends to the CPU."""
    import megatron.bridge
    import torch

    torch.cuda.is_available = lambda: True
    # A torch that is built for CUDA would believe this, and ask its driver.
    torch.accelerator.current_accelerator = lambda check_available=False: None
    # The package imports the recipes of all models, and 0.6 has some that need diffusers.
    recipes = types.ModuleType("megatron.bridge.recipes")
    recipes.__path__ = [f"{path}/recipes" for path in megatron.bridge.__path__]
    sys.modules[recipes.__name__] = recipes
    from megatron.bridge.training import eval as evaluation
    from megatron.bridge.training import initialize, train

    # The wheel of Megatron-Core has these compiled, and no Makefile.
    initialize.compile_helpers = lambda: None
    # The stand-in of ModelOpt knows no answer; this is the real one's without a distillation.
    for module in (train, evaluation):
        module.get_tensor_shapes_adjust_fn_for_distillation = lambda *args, **kwargs: None


def write_data(folder: Path) -> None:
    """A tiny Qwen2 folder, and questions and answers of 3 to 60 tokens."""
    from tests import hf_models

    hf_models.make_folder(folder / "hf", "qwen2")
    source = random.Random(0)
    for name, count in NUM_SAMPLES.items():
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(count):
                answer = _letters(source, source.choice([2, 4, 7, 12, 20, 40]))
                question = _letters(source, source.randint(1, 8))
                file.write(json.dumps({"input": question, "output": answer}) + "\n")


def in_process_of_its_own(folder: Path, case: str) -> None:
    """Run this worker as a job of one rank."""
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {k: v for k, v in os.environ.items() if k not in ours and "TORCHELASTIC" not in k}
    command = [sys.executable, "-m", "tests.hosts.steps.megatron_bridge", str(folder)]
    subprocess.run([*command, "--case", case], check=True, env=environment)


def import_checkpoint(folder: Path) -> None:
    """The folder's weights as Bridge's checkpoint, by the parts of `AutoBridge.import_ckpt`."""
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(str(folder / "hf"))
    provider = bridge.to_megatron_provider()
    provider.transformer_layer_spec = _spec(crosses=False)
    provider.cross_entropy_loss_fusion = False
    provider.finalize()
    model = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    bridge.save_megatron_model(model, folder / "imported")


def _letters(source: random.Random, count: int) -> str:
    return "".join(source.choice(string.ascii_lowercase) for _ in range(count))


def recipe(folder: Path, layout: Layout, steps: int, case: set[str]) -> Any:
    """Bridge's SFT recipe for Qwen2, with the folder's model and data, on a layout."""
    import torch
    from megatron.bridge import AutoBridge
    from megatron.bridge.recipes.qwen import qwen2

    # The recipe names its folder on the hub.
    from_folder = functools.partial(AutoBridge.from_hf_pretrained, str(folder / "hf"))
    qwen2_500m_sft_config = qwen2.qwen2_500m_sft_config
    # 0.6 has it in another module, under another name.
    sys.modules[qwen2_500m_sft_config.__module__].AutoBridge = type(  # type: ignore[attr-defined]
        "FolderBridge", (), {"from_hf_pretrained": staticmethod(lambda name: from_folder())}
    )
    cfg = qwen2_500m_sft_config()
    model = cfg.model
    model.seq_length = SEQ_LENGTH
    model.pipeline_model_parallel_size = layout.pp
    model.virtual_pipeline_model_parallel_size = layout.vpp if layout.vpp > 1 else None
    model.pipeline_dtype = torch.float32
    model.overlap_p2p_comm = "overlap" in case
    model.batch_p2p_comm = "overlap" not in case
    model.deallocate_pipeline_outputs = "keep" not in case
    model.calculate_per_token_loss = True
    model.transformer_layer_spec = _spec("crossing" in case)
    model.transformer_impl = "local"
    model.cross_entropy_loss_fusion = False
    model.use_cpu_initialization = True
    # transformers 5 moved rope_theta, where this Bridge does not find it: it would take 10000.
    model.rotary_base = 1_000_000
    if "finetune" in case:
        cfg.checkpoint.pretrained_checkpoint = str(folder / "imported")
    else:
        model.register_pre_wrap_hook(
            lambda chunks: from_folder(torch_dtype=torch.float32).load_hf_weights(chunks)
        )
    cfg.checkpoint.save = str(folder / "saved") if "finetune" in case else None
    cfg.checkpoint.load = None
    cfg.mixed_precision = None
    cfg.optimizer.bf16 = False
    cfg.optimizer.params_dtype = torch.float32
    cfg.optimizer.lr = 1e-3
    cfg.ddp.overlap_grad_reduce = False
    cfg.ddp.overlap_param_gather = False
    cfg.ddp.average_in_collective = False
    cfg.train.train_iters = steps
    cfg.train.global_batch_size = GLOBAL_BATCH
    # 0.6 has settings of its own for evaluation.
    evaluation = getattr(cfg, "validation", cfg.train)
    evaluation.eval_iters = 1
    evaluation.eval_interval = steps
    cfg.scheduler.lr_warmup_iters = 0
    cfg.scheduler.lr_decay_iters = steps + 1
    cfg.logger.tensorboard_dir = None
    cfg.dist.distributed_backend = "gloo"
    cfg.tokenizer.tokenizer_model = str(folder / "hf")
    cfg.dataset = dataset(folder, case)
    return cfg


def dataset(folder: Path, case: set[str]) -> Any:
    """The folder's questions and answers as Bridge's data set."""
    from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetConfig
    from megatron.bridge.data.packing.config import PackedSequenceSpecs

    return GPTSFTDatasetConfig(
        dataset_root=str(folder),
        seq_length=SEQ_LENGTH,
        dataset_kwargs={"pad_to_max_length": True},
        do_test=False,
        num_workers=0,
        persistent_workers=False,
        pin_memory=False,
        memmap_workers=1,
        enable_offline_packing=True,
        offline_packing_specs=PackedSequenceSpecs(
            packed_sequence_size=SEQ_LENGTH, tokenizer_model_name="tiny"
        ),
    )


def _spec(crosses: bool) -> Callable[[Any], Any]:
    """The layer of a Bridge model with attention that runs on a CPU."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    from megapack.job.gpt.specs import local_layer_spec
    from megapack.model.attention.sdpa import PackedSDPA

    class CrossingSDPA(PackedSDPA):
        """Takes a row without sample bounds for one sample, as Transformer Engine does."""

        def forward(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("packed_seq_params") is not None:
                return super().forward(query, key, value, *args, **kwargs)
            tokens = query.shape[0]
            bounds = torch.tensor([0, tokens], dtype=torch.int32)
            kwargs["packed_seq_params"] = PackedSeqParams(
                qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds
            )
            parts = [x.squeeze(1) for x in (query, key, value)]
            return super().forward(*parts, *args, **kwargs).view(tokens, 1, -1)

    def spec(config: Any) -> Any:
        layer = local_layer_spec(config)
        if crosses:
            layer.submodules.self_attention.submodules.core_attention = CrossingSDPA
        return layer

    return spec


def record(report: job.Report, case: set[str]) -> None:
    """From here on, note what Bridge's train step and evaluation are given and return."""
    from megatron.bridge.training import eval as evaluation
    from megatron.bridge.training import train

    train_step = train.train_step
    evaluate = evaluation.evaluate
    rows: list[int] = []

    def note_row(module: Any, args: Any, kwargs: Any) -> None:
        tokens = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        params = kwargs.get("packed_seq_params")
        # The last stage of a pipeline is given no tokens.
        length = 0 if params is None else int(params.cu_seqlens_q[-1])
        rows.append(length if tokens is None else int(tokens.numel()))

    def step(forward_step_func: Any, data_iterator: Any, model: Any, *others: Any) -> Any:
        if "images" in case and not report.losses and not report.grad_norms:
            images.watch_tower(report, others[0], model)
            if "reference" in case:
                found = bridge_images.one_sample_step(model[0], GLOBAL_BATCH)
                report.more["reference_loss"], report.more["reference_tower_gradients"] = found
        hook = model[0].register_forward_pre_hook(note_row, with_kwargs=True)
        result = job.timed(
            report, lambda: train_step(forward_step_func, data_iterator, model, *others)
        )
        hook.remove()
        report.losses += [float(result[0]["lm loss"])] if result[0] else []
        report.grad_norms.append(float(result[5]))
        report.num_microbatches.append(len(rows))
        report.row_tokens.append(list(rows))
        rows.clear()
        params = [param for chunk in model for param in chunk.parameters()]
        report.params_sum = sum(float(param.double().abs().sum()) for param in params)
        return result

    def evaluated(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        losses = report.more.setdefault("evaluated", [])
        losses += [float(result[0]["lm loss"])] if result[0] else []
        return result

    train.train_step = step
    evaluation.evaluate = evaluated


def main() -> None:
    """Train on a layout and write this rank's report."""
    arguments = job.parse_arguments()
    case = set(filter(None, arguments.case.split(",")))
    from megapack import launch

    if runs_te():
        # Before the stand-ins, which would take the place of Transformer Engine's kernels.
        launch.start("cpu")
    import_bridge()
    patching.apply(*arguments.patches)
    if not runs_te():
        launch.start("cpu")
    import torch.distributed as dist

    redirect_to_cpu()
    from megatron.bridge.training.finetune import finetune
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    folder = arguments.folder
    if "import" in case:
        import_checkpoint(folder)
        return
    if dist.get_rank() == 0:
        write_data(folder)
        if "finetune" in case:
            in_process_of_its_own(folder, "import")
    dist.barrier()
    report = job.Report()
    job.count_shape_exchanges(report)
    record(report, case)
    cfg = recipe(folder, arguments.layout, arguments.steps, case)
    step: Any = forward_step
    if "images" in case:
        from megatron.bridge.models.qwen_vl.qwen3_vl_step import forward_step as step

        bridge_images.set_model(cfg, arguments.layout, case)
    if "planned" in case and "megatron_bridge" in arguments.patches:
        step = megatron_bridge.PlannedStep(max_tokens_per_gpu=BUDGET)
    (finetune if "finetune" in case else pretrain)(cfg, step)
    report.more["saved"] = sorted(path.name for path in folder.glob("saved/*"))
    metadata = list(folder.glob("packed/*/*metadata.jsonl"))
    report.more["packs"] = json.loads(metadata[0].read_text()) if metadata else []
    report.more["folder"] = str(folder)
    job.write(report, folder)


if __name__ == "__main__":
    main()
