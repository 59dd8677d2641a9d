"""verl's Megatron engine on a CPU: its own train_batch and infer_batch, losses and optimizer.

    torchrun --nproc-per-node 2 -m tests.hosts.steps.verl OUT --layout pp=2,vpp=2 \
        --patches verl --steps 2 --case ppo

Ours are the model, in place of what a Hugging Face bridge makes, and the toy rollout.
"""

from __future__ import annotations

import functools
import sys
import types
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapack import Layout, launch, patching
from tests.dist import problem
from tests.hosts.steps import adapters, images
from tests.hosts.steps.chunks import bridge_settings, host_chunks
from tests.hosts.steps.job import (
    Report,
    count_layer_tokens,
    count_shape_exchanges,
    import_host,
    parse_arguments,
    tensors,
    timed,
    watch_gradients,
    write,
)
from tests.hosts.steps.mamba import HYBRID, PATTERN, Told, mamba_chunks
from tests.hosts.steps.rl_samples import Sample, draw
from tools.hosting import import_stubs
from tools.hosting.sources import installed

NUM_SAMPLES = 16
BUDGET = 90
TOP = 8


@dataclass(frozen=True)
class Case:
    """A budget in tokens per micro-batch, settings of verl's loss, and which toy it trains."""

    budget: int = BUDGET
    loss: dict[str, Any] = field(default_factory=dict)
    pattern: str = ""
    """Layers of the toy of `mamba`; "" = a GPT."""
    common_prompts: bool = False
    lora: bool = False
    images: bool = False
    dynamic_cp: int = 0
    """Tokens per GPU under verl's dynamic CP; 0 for none."""
    distillation: bool = False
    """The loss is verl's forward KL to a teacher's top tokens."""
    alone: bool = False
    """Each sample is a micro-batch."""


DR_GRPO = {"loss_agg_mode": "seq-mean-token-sum-norm"}
CASES = {
    "": Case(),
    "whole": Case(budget=4000),
    "dr_grpo": Case(loss=DR_GRPO),
    "dr_grpo_whole": Case(budget=4000, loss=DR_GRPO),
    "dr_grpo_factor": Case(loss={**DR_GRPO, "loss_scale_factor": 44}),
    "dr_grpo_factor_whole": Case(budget=4000, loss={**DR_GRPO, "loss_scale_factor": 44}),
    "prompts": Case(common_prompts=True),
    "prompts_shared": Case(common_prompts=True),
    "lora": Case(lora=True),
    "images": Case(images=True),
    "images_dynamic_cp": Case(images=True, dynamic_cp=24),
    "images_alone": Case(images=True, alone=True),
    "dynamic_cp": Case(dynamic_cp=24),
    "distillation": Case(distillation=True),
    "distillation_dynamic_cp": Case(distillation=True, dynamic_cp=24),
    "distillation_alone": Case(distillation=True, alone=True),
    "text_alone": Case(alone=True),
    "mamba": Case(pattern=PATTERN),
    "mamba_whole": Case(budget=4000, pattern=PATTERN),
    "hybrid_alone": Case(pattern=HYBRID, common_prompts=True, alone=True),
    "hybrid_prompts": Case(pattern=HYBRID, common_prompts=True),
    "hybrid_prompts_shared": Case(pattern=HYBRID, common_prompts=True),
}
# Small packages that verl's batches are made of.
REQUIREMENTS = ("tensordict==0.15.3", "pyvers==0.2.3")
STUBS = (
    *("ray", "omegaconf", "hydra", "codetiming", "megatron.bridge", "mbridge", "peft"),
    *("accelerate", "datasets", "pandas", "torchdata", "wandb", "orjson", "cloudpickle"),
    *("PIL", "torchvision", "pyarrow", "qwen_vl_utils", "flash_attn", "vllm", "sglang"),
)


def import_verl() -> None:
    """Import verl's engine; what is real must be imported before the stand-ins."""
    import transformers

    for name in ("AutoConfig", "AutoModelForCausalLM", "PreTrainedModel", "PreTrainedTokenizer"):
        getattr(transformers, name)
    import_host("verl")
    sys.path += [str(installed(requirement)) for requirement in REQUIREMENTS]
    import_stubs.install(*STUBS)
    from verl.workers.engine.megatron import transformer_impl

    transformer_impl.MegatronCheckpointManager = types.SimpleNamespace
    transformer_impl.log_gpu_memory_usage = lambda *args, **kwargs: None


def make_engine(layout: Layout, case: Case) -> Any:
    """verl's engine with a language-model head, with our chunks where a bridge's would be."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from verl.workers.config import McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    class Engine(MegatronEngineWithLMHead):  # type: ignore[misc]
        def _build_tf_config(self) -> None:
            self.param_dtype = torch.float32
            self.is_value_model = False
            self.share_embeddings_and_output_weights = True
            self.tf_config = self.bridge = self.provider = self.peft_cls = None
            if case.lora:
                from verl.workers.config.megatron_peft import get_peft_cls

                self.peft_cls = get_peft_cls(self.model_config, object(), object(), torch.float32)

        def _build_megatron_module(self) -> Any:
            model_parallel_cuda_manual_seed(problem.SEED)
            settings = bridge_settings(layout)
            # verl sets it with dynamic CP.
            settings["calculate_per_token_loss"] = bool(case.dynamic_cp)
            adapt = self._adapt if case.lora else None
            if case.images:
                chunks = images.image_chunks(layout, settings, images.make_bridge_model)
            elif case.pattern:
                chunks = mamba_chunks(settings, case.pattern)
            else:
                chunks = host_chunks(layout, settings, before_wrapping=adapt)
            self.tf_config = chunks[0].config
            return chunks

        def _adapt(self, chunks: list[Any]) -> None:
            from megatron.bridge.peft.utils import create_peft_hook

            create_peft_hook(self.peft_cls, training=True)(chunks)
            adapters.draw(chunks)

    engine = Engine(
        model_config=types.SimpleNamespace(
            model_type="language_model",
            hf_config=types.SimpleNamespace(
                architectures=["Qwen2ForCausalLM"],
                model_type="qwen2",
                # By this verl tells a model with images.
                **({"vision_config": images.VISION_CONFIG} if case.images else {}),
            ),
            local_path="",
            mtp=types.SimpleNamespace(enable=False, enable_train=False),
            tokenizer=types.SimpleNamespace(pad_token_id=0),
            architectures=["Qwen2ForCausalLM"],
            get_processor=lambda: None,
            lora={
                "rank": adapters.RANK if case.lora else 0,
                "alpha": adapters.ALPHA,
                "target_modules": list(adapters.TARGETS),
            },
        ),
        engine_config=McoreEngineConfig(
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            tensor_model_parallel_size=layout.tp,
            use_distributed_optimizer=False,
            use_dynamic_bsz=not case.alone,
            max_token_len_per_gpu=case.budget // layout.cp,
            **dynamic_cp(case),
        ),
        optimizer_config=McoreOptimizerConfig(
            lr=1e-2, clip_grad=1.0, weight_decay=0.0, total_training_steps=100
        ),
        checkpoint_config=None,
    )
    engine.initialize()
    return engine


def dynamic_cp(case: Case) -> dict[str, Any]:
    """verl main's keys of dynamic CP; releases do not have them."""
    if not case.dynamic_cp:
        return {}
    return {
        "dynamic_context_parallel": True,
        "max_seqlen_per_dp_cp_rank": case.dynamic_cp,
        "use_remove_padding": True,
    }


def make_batch(samples: list[Sample], dp_rank: int, dp_size: int) -> Any:
    """This rank's samples as verl's trainer hands them out: without padding, in nested tensors."""
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
    from verl.utils import tensordict_utils as tu

    rewards = torch.zeros(len(samples), max(s.response.numel() for s in samples))
    masks = torch.zeros_like(rewards)
    for i, sample in enumerate(samples):
        rewards[i, sample.response.numel() - 1] = sample.reward
        masks[i, : sample.response.numel()] = sample.mask
    groups = _objects([sample.group for sample in samples])
    advantages, _ = compute_grpo_outcome_advantage(rewards, masks, groups)
    own = range(dp_rank, len(samples), dp_size)
    fields = {
        "input_ids": [samples[i].tokens for i in own],
        "prompts": [samples[i].prompt for i in own],
        "responses": [samples[i].response for i in own],
        "response_mask": [samples[i].mask for i in own],
        "loss_mask": [samples[i].mask for i in own],
        "advantages": [advantages[i, : samples[i].response.numel()] for i in own],
    }
    batch = tu.get_tensordict(
        {name: nested(values) for name, values in fields.items()},
        {"temperature": 1.0, "global_batch_size": len(samples)},
    )
    if any(sample.images for sample in samples):
        from tensordict import NonTensorData, NonTensorStack

        inputs = [NonTensorData(samples[i].images or {}) for i in own]
        batch["multi_modal_inputs"] = NonTensorStack(*inputs)
    return batch


def distillation_loss(actor: Any, batch: Any) -> Any:
    """verl's loss, and in the batch a teacher's `TOP` tokens at each position."""
    from verl.trainer.distillation.losses import distillation_ppo_loss
    from verl.utils import tensordict_utils as tu
    from verl.workers.config.distillation import DistillationConfig, DistillationLossConfig

    ids, values = [], []
    for tokens in batch["input_ids"].unbind():
        generator = torch.Generator().manual_seed(int(tokens.sum()))
        logits_TV = torch.randn(len(tokens), problem.VOCAB_SIZE, generator=generator)
        best = logits_TV.log_softmax(-1).topk(TOP)
        ids.append(best.indices)
        values.append(best.values)
    batch["teacher_ids"], batch["teacher_logprobs"] = nested(ids), nested(values)
    tu.assign_non_tensor(batch, distillation_use_topk=True, distillation_only=True)
    loss = DistillationLossConfig(
        loss_mode="forward_kl_topk", topk=TOP, use_task_rewards=False, use_policy_gradient=False
    )
    return functools.partial(
        distillation_ppo_loss, actor, DistillationConfig(distillation_loss=loss)
    )


def nested(values: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(values, layout=torch.jagged)


def _objects(values: list[int]) -> Any:
    import numpy as np

    return np.array(values, dtype=object)


def log_probs(engine: Any, batch: Any) -> list[Tensor]:
    """The log-probs of every response by verl's infer_batch, on every rank of the pipeline."""
    from megatron.core import parallel_state

    with engine.eval_mode():
        output = engine.infer_batch(copy_of(batch, engine), loss_function=None)
    found: list[Any] = [None]
    if output and output["model_output"]:
        values = output["model_output"]["log_probs"].unbind()
        sizes = [(len(p), len(r)) for p, r in _pairs(batch)]
        # The log-prob of a token is at the position before it.
        found = [[v[p - 1 : p + r - 1] for v, (p, r) in zip(values, sizes, strict=True)]]
    if engine.get_data_parallel_size() < parallel_state.get_data_parallel_world_size():
        # Under dynamic CP one rank has those of all.
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, found[0])
        return list(next(filter(None, everywhere)))
    group = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast_object_list(
        found, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group
    )
    return list(found[0])


def _pairs(batch: Any) -> list[tuple[Tensor, Tensor]]:
    return list(zip(batch["prompts"].unbind(), batch["responses"].unbind(), strict=True))


def copy_of(batch: Any, engine: Any) -> Any:
    """A batch for one call, with what verl's worker adds; the call changes it."""
    from verl.utils import tensordict_utils as tu

    copy = batch.copy()
    tu.assign_non_tensor(
        copy,
        max_token_len_per_gpu=engine.engine_config.max_token_len_per_gpu,
        micro_batch_size_per_gpu=1,
        use_dynamic_bsz=engine.engine_config.use_dynamic_bsz,
    )
    return copy


def watch_rows(engine: Any, report: Report) -> None:
    """Note the rows that the engine's first chunk is given, per training step."""

    def note(chunk: Any, args: Any, kwargs: Any) -> None:
        if engine.mode == "train" and report.row_tokens:
            # Later stages are given the samples, not the row.
            ends = kwargs["packed_seq_params"].cu_seqlens_q_padded
            report.row_tokens[-1].append(int(ends[-1]))

    engine.module[0].register_forward_pre_hook(note, with_kwargs=True)


def main() -> None:
    arguments = parse_arguments()
    case = CASES[arguments.case]
    warnings.simplefilter("ignore")
    launch.start("cpu")
    if case.lora:
        adapters.import_bridge()
    if case.images:
        images.import_bridge_model()
    import_verl()
    # Megatron names the GPU of its barriers, and gloo has none.
    barrier = dist.barrier
    dist.barrier = lambda group=None, **_: barrier(group)
    patching.apply(*arguments.patches)
    if "verl_dynamic_cp" in arguments.patches:
        from megapack.hosts import verl

        verl.configure(layout=arguments.layout)
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    report = Report()
    layout = arguments.layout
    engine = make_engine(layout, case)
    count_shape_exchanges(report)
    samples = draw(NUM_SAMPLES, common_prompts=case.common_prompts, images=case.images)
    actor = ActorConfig(strategy="megatron", rollout_n=4, use_dynamic_bsz=True, **case.loss)
    batch = make_batch(samples, engine.get_data_parallel_rank(), engine.get_data_parallel_size())
    old = log_probs(engine, batch)
    batch["old_log_probs"] = nested(old)
    report.logprobs.append(torch.cat(old).tolist())
    if case.lora:
        with engine.disable_adapter():
            report.more["reference_logprobs"] = torch.cat(log_probs(engine, batch)).tolist()
    trained = batch.copy()
    loss = functools.partial(ppo_loss, actor)
    if case.distillation:
        loss = distillation_loss(actor, trained)
    watch_rows(engine, report)
    count_layer_tokens(report, engine.module[0])
    watch_gradients(report, engine.optimizer, engine.module)
    adapters.watch(report, engine.optimizer, engine.module)
    if case.images:
        images.watch_tower(report, engine.optimizer, engine.module)
    report.more["told"] = Told(engine.module[0]).rows
    for _ in range(arguments.steps):
        report.row_tokens.append([])
        with engine.train_mode():
            output = timed(
                report,
                lambda: engine.train_batch(copy_of(trained, engine), loss),
            )
        engine.lr_scheduler_step()
        note(report, output)
        report.logprobs.append(torch.cat(log_probs(engine, batch)).tolist())
    params = [p for chunk in engine.module for p in chunk.parameters()]
    report.params_sum = sum(float(p.detach().double().abs().sum()) for p in params)
    report.more["weights"] = tensors(engine.module, lambda param: param)
    write(report, arguments.folder)
    launch.stop()


def note(report: Report, output: Any) -> None:
    """What verl reports of a step, on the ranks where it does."""
    if not output:
        return
    metrics = output["metrics"]
    name = "actor/pg_loss" if "actor/pg_loss" in metrics else "distillation/loss"
    report.losses.append(float(metrics[name].aggregate()))
    report.num_microbatches.append(len(output["loss"]))
    if "grad_norm" in output["metrics"]:
        report.grad_norms.append(float(output["metrics"]["grad_norm"]))


if __name__ == "__main__":
    main()
