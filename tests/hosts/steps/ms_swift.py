"""ms-swift's own Megatron trainer on a CPU: packing, collator, loader, loss, step, evaluation.

    torchrun --nproc-per-node 2 -m tests.hosts.steps.ms_swift OUT --layout pp=2,vpp=2

A step trains all samples once, so that its loss does not depend on the packing. The case "lora" has
mcore-bridge's adapters, which are peft's on Transformer Engine's layers.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from megapack import Layout, launch, patching
from tests.hosts.lora import packages
from tests.hosts.steps import adapters
from tests.hosts.steps.job import (
    Arguments,
    Report,
    count_shape_exchanges,
    import_host,
    parse_arguments,
    timed,
    write,
)
from tests.hosts.steps.mamba import Told, mamba_model
from tests.te_python import runs_te
from tools.hosting import import_stubs
from tools.hosting.sources import installed, source

PACKING_LENGTH = 96
NUM_PACKS = 4
"""Packs of all samples, by ms-swift's packing and by megapack's."""
LENGTHS = [26, 7, 7, 7, 47, 40, 6, 62, 30, 49, 19, 33]
"""Tokens of the samples: 333 of the 384 that 4 packs hold."""
ABSENT = (
    *("mcore_bridge", "modelscope", "accelerate", "peft", "datasets", "trl"),
    *("vllm", "addict", "dacite", "json_repair", "aiohttp", "pandas", "requests", "PIL", "oss2"),
    *("attrdict", "einops", "openai", "uvicorn", "fastapi", "matplotlib", "urllib3"),
    "bitsandbytes",
)


def main() -> None:
    """Train and evaluate some steps, and write this rank's report."""
    args = parse_arguments()
    report = Report()
    _import_swift(str(args.folder), has_lora=args.case == "lora")
    launch.start("cpu")
    patching.apply(*args.patches)
    trainer = make_trainer(args, report)
    count_shape_exchanges(report)
    train_packs = make_packs(trainer.template)
    report.more["packs"] = train_packs.packed_length
    train, val = trainer.setup_training(train_packs, make_packs(trainer.template))
    adapters.watch(report, trainer.optimizer, trainer.unwrapped_models)
    report.more["eval_losses"] = []
    for _ in range(args.steps):
        run_one(trainer, train, val, report)
    report.params_sum = sum(
        float(param.detach().double().abs().sum())
        for model in trainer.unwrapped_models
        for param in model.parameters()
    )
    write(report, args.folder)


def _import_swift(folder: str, *, has_lora: bool) -> None:
    import megatron.core.models.gpt  # noqa: F401
    import transformers  # noqa: F401 - both before the stubs, which they take for real ones

    import_host("ms_swift")
    sys.path.append(str(installed("binpacking==2.0.1")))
    if has_lora:
        packages.add_peft()
        sys.path.append(str(source("mcore_bridge")))
    import_stubs.install(*ABSENT, *(("triton",) if has_lora else ()))
    import modelscope.hub.utils.utils

    modelscope.hub.utils.utils.get_cache_dir = lambda: folder
    # Before the CPU takes the place of CUDA: it compiles functions with torch.jit.
    import swift.megatron.trainers.trainer  # noqa: F401


def run_one(trainer: Any, train: Any, val: Any, report: Report) -> None:
    """One evaluation and one training step, both of all samples."""
    report.row_tokens.append([])
    metrics = trainer.evaluate(val)
    if "loss" in metrics:
        report.more["eval_losses"].append(float(metrics["loss"]))
    for model in trainer.wrapped_models:
        model.train()
    # A report's rows are those of training.
    report.more.setdefault("forward_rows", []).append(report.row_tokens.pop())
    report.row_tokens.append([])
    timed(report, lambda: trainer.run_train_step(train, val))
    logged = trainer._last_logged_metrics
    if "loss" in logged:
        report.losses.append(float(logged["loss"]))
    report.grad_norms.append(float(logged["grad_norm"]))
    report.num_microbatches.append(trainer.args.num_microbatches)


def make_trainer(args: Arguments, report: Report) -> Any:
    """ms-swift's trainer around this rank's chunks, with its own optimizer, loader and callbacks.

    mcore-bridge's models are made of Transformer Engine's layers; these are Megatron's local ones.
    """
    from swift.megatron.trainers import base
    from swift.megatron.trainers.trainer import MegatronTrainer
    from swift.megatron.utils import prepare_mcore_model, wrap_model

    class CpuTrainer(MegatronTrainer):  # type: ignore[misc]
        def prepare_model(self) -> None:
            self.unwrapped_models = make_models(args, report)
            report.more["told"] = Told(self.unwrapped_models[0]).rows
            self.config = self.unwrapped_models[0].config
            self.bridge = None
            self.peft_models = self.unwrapped_models
            if args.case == "lora":
                self.peft_models = [
                    prepare_mcore_model(self.args, model) for model in self.unwrapped_models
                ]
                adapters.draw(self.unwrapped_models)
            self.wrapped_models = wrap_model(
                self.args, [between(model) for model in self.unwrapped_models]
            )

    base.warmup_jit_function = lambda *_: None  # compiles CUDA kernels
    given = arguments(args.layout)
    if args.case == "lora":
        vars(given).update(_lora_arguments())
    return CpuTrainer(given, make_template())


def between(model: Any) -> Any:
    """The model below a module, as Megatron's Float16Module has it in 16 bits.

    Later versions than 4.6 read `model.module.module` of DDP's module, whatever the precision.
    """
    from megatron.core.transformer.module import MegatronModule

    class Between(MegatronModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(model.config)
            self.add_module("module", model)
            self.set_input_tensor = model.set_input_tensor

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

    return Between()


def make_models(args: Arguments, report: Report) -> list[Any]:
    """The chunks of a tiny GPT, with the pipeline settings that ms-swift's arguments choose.

    The case "mamba" is a toy with Mamba-2 layers, on one stage.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    from megapack.job.gpt import initialize_parallel, transformer_config
    from megapack.job.gpt.init import initialize_by_name
    from megapack.job.gpt.specs import block_spec, local_layer_spec
    from tests.dist import problem
    from tests.dist.setup import on_kernels_of_job

    class CpuModel(GPTModel):  # type: ignore[misc]
        def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> None:
            """peft asks for it; mcore-bridge's model has an empty one too."""

        def forward(self, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.vp_stage:  # the first chunk of a stage: all get the same rows
                report.row_tokens[-1].append(input_ids.numel())
            return super().forward(input_ids, *args, **kwargs)

    layout = args.layout
    initialize_parallel(layout, problem.SEED)
    settings = {"variable_seq_lengths": True, "deallocate_pipeline_outputs": True}
    if args.case == "mamba":
        toy = mamba_model(settings)
        toy.register_forward_pre_hook(
            lambda _, inputs, named: report.row_tokens[-1].append(
                (inputs or [named["input_ids"]])[0].numel()
            ),
            with_kwargs=True,
        )
        return [toy]
    config = transformer_config(on_kernels_of_job(problem.MODEL), layout)
    for name, value in settings.items():
        setattr(config, name, value)
    models = []
    for stage in range(layout.vpp):
        vp_stage = stage if layout.vpp > 1 else None
        ends = {"ignore_virtual": False, "vp_stage": vp_stage}
        model = CpuModel(
            config,
            block_spec("te", config, vp_stage) if runs_te() else local_layer_spec(config),
            vocab_size=128,
            max_sequence_length=PACKING_LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(**ends),
            post_process=parallel_state.is_pipeline_last_stage(**ends),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )
        models.append(model)
    initialize_by_name(
        models,
        seed=problem.SEED,
        std=problem.MODEL.init_std,
        num_layers=problem.NUM_LAYERS,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
    )
    return models


def make_template() -> Any:
    """ms-swift's template, without the model's tokenizer: samples are tokens already."""
    from swift.template import Template

    template = object.__new__(Template)
    template.processor = SimpleNamespace(pad_token_id=0)
    template.packing = template.padding_free = template.use_megatron = True
    template.remove_unused_columns = True
    template.task_type = "causal_lm"
    template.mode = "train"
    template.padding_side = "right"
    template.sequence_parallel_size = 1
    template.max_length = PACKING_LENGTH
    template.config = None
    return template


class Samples:
    """Tokenized samples, as ms-swift's encoding leaves them."""

    def __getitem__(self, key: int | str) -> Any:
        if key == "lengths":
            return LENGTHS
        assert isinstance(key, int)
        tokens = [1 + (31 * key + 7 * i * i) % 99 for i in range(LENGTHS[key])]
        labels = [-100] * (len(tokens) // 3) + tokens[len(tokens) // 3 :]
        return {"input_ids": tokens, "labels": labels, "length": len(tokens)}

    def __len__(self) -> int:
        return len(LENGTHS)


def make_packs(template: Any) -> Any:
    """ms-swift's packed dataset; its packing runs in this process instead of one of its own."""
    from swift.dataset import packing

    def run(context: Any, *, target: Any, jobs: Any) -> None:
        for job in jobs:
            target(*job)

    packing._spawn_workers = run
    packs = packing.PackingDataset(template, Samples())
    assert len(packs) == NUM_PACKS, packs.packed_length
    return packs


def arguments(layout: Layout) -> SimpleNamespace:
    """The arguments that ms-swift's trainer reads, with the values of its command line."""
    return SimpleNamespace(
        **_model_arguments(layout), **_optimizer_arguments(), **_loop_arguments(layout)
    )


def _model_arguments(layout: Layout) -> dict[str, Any]:
    absent = ("mcore_model", "mcore_adapter", "mtp_num_layers", "dsa_indexer_loss_coeff")
    off = ("tp_comm_overlap", "fp16", "bf16", "sequence_parallel", "is_multimodal", "check_model")
    return {
        **dict.fromkeys(absent),
        **dict.fromkeys(off, False),
        "router_replay_mode": "disabled",
        "padding_free": True,
        "new_special_tokens": [],
        "task_type": "causal_lm",
        "tuner_type": "full",
        "finetune": True,
        "attention_backend": "flash",
        "fp8_recipe": None,
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "seq_length": PACKING_LENGTH,
    }


def _lora_arguments() -> dict[str, Any]:
    absent = ("lora_dtype", "mcore_ref_adapter", "ref_adapters")
    return {
        **dict.fromkeys(absent),
        "tuner_type": "lora",
        "target_modules": ["all-linear"],
        "modules_to_save": [],
        "lora_rank": adapters.RANK,
        "lora_alpha": adapters.ALPHA,
        "lora_dropout": 0.0,
        "lora_bias": "none",
        "use_rslora": False,
        "language_model_only": False,
    }


def _optimizer_arguments() -> dict[str, Any]:
    absent = ("lr_decay_iters", "lr_wsd_decay_iters", "lr_warmup_fraction", "vit_lr", "aligner_lr")
    off = (
        *("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"),
        *("overlap_param_gather_with_optimizer_step", "data_parallel_random_init"),
        *("apply_wd_to_qk_layernorm", "use_megatron_fsdp", "accumulate_allreduce_grads_in_fp32"),
    )
    zero = ("min_lr", "weight_decay", "lr_warmup_iters", "lr_warmup_init")
    return {
        **dict.fromkeys(absent),
        **dict.fromkeys(off, False),
        **dict.fromkeys((*zero, "start_weight_decay", "end_weight_decay"), 0.0),
        "optimizer": "adam",
        "lr": 1e-2,
        "clip_grad": 1.0,
        "lr_decay_style": "constant",
        "weight_decay_incr_style": "constant",
        "lr_wsd_decay_style": "exponential",
    }


def _loop_arguments(layout: Layout) -> dict[str, Any]:
    off = (
        *("async_save", "streaming", "data_sharding", "train_dataloader_shuffle", "manual_gc"),
        *("group_by_length", "dataloader_pin_memory", "dataloader_persistent_workers"),
        *("enable_dft_loss", "enable_channel_loss", "nccl_comm_warmup"),
    )
    absent = ("rlhf_type", "num_train_epochs", "eval_steps", "save_steps")
    return {
        **dict.fromkeys(absent),
        **dict.fromkeys(off, False),
        "callbacks": ["default_flow"],
        "train_iters": 1000,
        "eval_iters": 1,
        "logging_steps": 1,
        "data_seed": 42,
        "dataloader_num_workers": 0,
        "dataloader_prefetch_factor": None,
        "micro_batch_size": 1,
        "global_batch_size": NUM_PACKS,
        "num_microbatches": NUM_PACKS // layout.dp,
    }


if __name__ == "__main__":
    main()
