"""What the workers of slime and miles share: the rollout, the arguments, the model, the report.

A case is a list of words, joined by `+`: `tokens+fanout+removed`.

    tokens      calculate_per_token_loss: every token of a step counts the same
    fanout      rollouts have 1 to 3 samples
    removed     every seventh sample has remove_sample set: none of its tokens counts
    prompts     the four samples of a group begin with the same 14 tokens
    shared      MEGAPACK_SHARE_PREFIXES=1
    long        for benches: each step is eight answers of 512 tokens to one prompt of 512, on a
                model of width 256
    short       samples have 6 to 16 tokens
    normalize   normalize_advantages: mean 0 and variance 1 over all loss tokens
    ppo         PPO's advantages, from made-up values of a critic
    experts     the model has experts with a balancing loss, and only that loss trains
    mamba       the model has Mamba-2 layers
    hybrid      the model has a gated delta net and Mamba-2 layers
    own         every second layer is the host's own gated delta net
    lora        the model has adapters, which miles makes
    slots       with lora: three adapters, and each sample is of one (miles)
    nooverlap   overlap_p2p_comm=False, which Megatron-LM's arguments refuse with pp2 x vpp2
    images      samples with pixels and grids, and the host's own model with its tower
    odd         with images: samples of odd numbers of tokens, too
    few         with images: only every eighth sample has some
    reduce      with images: gradients are reduced while the backward runs
    unpatched   with images: without what slime's image patches in Megatron
    narrow      half of the budget: the same samples in more rows
    reference   also run `one_sample_step`, on one rank
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from tests.hosts.steps import adapters, images
from tests.hosts.steps.job import (
    Arguments,
    Report,
    count_layer_tokens,
    count_shape_exchanges,
    import_host,
    parse_arguments,
    timed,
    write,
)
from tests.hosts.steps.mamba import Told, mamba_chunks, pattern_of
from tools.hosting import import_stubs
from tools.hosting.sources import source

ROLLOUTS_PER_STEP = 16
BUDGET = 128
LEARNING_RATE = 1e-3
PAD_MULTIPLE = 16

# What a CPU run of the step does not need: engines, trackers, servers, kernels, converters.
ABSENT = (
    *("ray", "sglang", "sglang_router", "megatron.bridge", "mbridge", "torch_memory_saver"),
    *("triton", "wandb", "tensorboard", "omegaconf", "six", "pylatexenc", "psutil", "polars"),
    *("httpx", "aiohttp", "requests", "urllib3", "uvicorn", "fastapi", "starlette", "blobfile"),
    *("msgspec", "zstandard", "cachetools", "plotly", "memray", "torchft", "mooncake"),
)


class HostArguments(SimpleNamespace):
    """A host's arguments. Those that nothing sets are None, which these hosts read as off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def start(host: str) -> Arguments:
    """Read the command line, patch, join the job, and make the host importable."""
    arguments = parse_arguments()
    warnings.simplefilter("ignore")
    from megapack import launch, patching

    patching.apply(*arguments.patches)
    launch.start("cpu")
    if "slots" in words(arguments):
        adapters.import_multi_lora()
    elif "lora" in words(arguments):
        adapters.import_bridge()
    # Behind the installed Megatron-Core: from the source tree only `megatron.training` is taken.
    sys.path.append(str(source("megatron_lm")))
    import_host(host)
    # Its compiled functions ask torch for triton when they are imported, which must not find a
    # stand-in.
    importlib.import_module("megatron.core.pipeline_parallel")
    import_stubs.install(*ABSENT)
    _replace_ray()
    _replace_cuda_queries()
    return arguments


def run(
    host: str,
    make_actor: Callable[[Any, list[Any]], Any],
    split_rollout: Callable[[Arguments, Any], tuple[list[Any], list[Any]]],
    train: Callable[..., None],
    make_lora: Callable[[Any], Any] | None = None,
    make_image_model: Callable[..., Any] | None = None,
) -> None:
    """A worker: the host's training actor on one rollout, and the report.

    Args:
        make_actor: of the host's arguments and this rank's chunks.
        split_rollout: the samples, and each data-parallel rank's part of them.
        train: notes in the report what the steps give.
        make_lora: of the host's arguments, for cases with `lora`.
        make_image_model: the same for cases with `images`; see `images.image_chunks`.
    """
    arguments = start(host)
    from megapack import launch

    report = Report()
    args = host_arguments(arguments)

    def adapt(chunks: list[Any]) -> None:
        if "own" in words(arguments):
            # Not at the top: it needs Triton.
            from tests.hosts import recurrent_layers

            recurrent_layers.use(host, args, chunks)
            return
        assert make_lora is not None, f"{host} has no LoRA"
        make_lora(args)(chunks, training=True)
        adapters.draw(chunks)

    if "images" in words(arguments):
        assert make_image_model is not None, f"{host} has no images"
        chunks = build_image_chunks(arguments, functools.partial(make_image_model, args))
    else:
        chunks = build_host_chunks(arguments, adapt if words(arguments) & {"lora", "own"} else None)
    actor = make_actor(args, chunks)
    samples, refs = split_rollout(arguments, args)
    if {"reference", "slots"} <= words(arguments):
        slots_reference(arguments, args, chunks, samples, refs[0].inner)
    elif "reference" in words(arguments):
        note_reference(report, args, chunks, samples, refs[0].inner, words(arguments))
    adapters.watch(report, actor.optimizer, chunks)
    if "images" in words(arguments):
        images.watch_tower(report, actor.optimizer, chunks)
    train(report, actor, refs, num_samples=len(samples))
    write(report, arguments.folder)
    launch.stop()


def _replace_ray() -> None:
    """Actors are plain classes, and the object store hands out what it was given."""
    import ray

    ray.remote = lambda *args, **kwargs: args[0] if args else (lambda actor: actor)
    ray.put = lambda value, **kwargs: value
    ray.get = lambda value, **kwargs: value


def _replace_cuda_queries() -> None:
    import torch

    class Event:
        """An event of a device that runs everything in order."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            """Takes what a CUDA event takes."""

        def record(self, stream: Any = None) -> None:
            """Nothing to record."""

        def synchronize(self) -> None:
            """Nothing to wait for."""

    torch.cuda.Event = Event
    torch.cuda.mem_get_info = lambda device=None: (1, 1)


def words(arguments: Arguments) -> set[str]:
    """The words of the case."""
    return set(filter(None, arguments.case.split("+")))


def host_arguments(arguments: Arguments) -> HostArguments:
    """The arguments that a launch script of slime or miles would give."""

    layout = arguments.layout
    case = words(arguments)
    num_rollouts = _rollouts_per_step(case) * arguments.steps
    budget = 8 * 1024 if "long" in case else BUDGET
    return HostArguments(
        case=case,
        **_sizes(_model(case)),
        micro_batch_size=1,
        max_tokens_per_gpu=budget // 2 if "narrow" in case else budget,
        use_dynamic_batch_size=True,
        use_dynamic_global_batch_size="slots" in case,
        multi_lora="slots" in case,
        multi_lora_n_adapters=adapters.NUM_SLOTS,
        folder=arguments.folder,
        clip_grad=1.0,
        balance_data=False,
        balance_by_flops=False,
        global_batch_size=_rollouts_per_step(case),
        rollout_batch_size=num_rollouts // _group(case),
        n_samples_per_prompt=_group(case),
        num_rollout=1,
        pipeline_model_parallel_size=layout.pp,
        tensor_model_parallel_size=layout.tp,
        context_parallel_size=layout.cp,
        data_pad_size_multiplier=PAD_MULTIPLE,
        qkv_format="thd",
        seq_length=4096,
        rollout_data_transport="object-store",
        rewards_normalization=True,
        grpo_std_normalization=True,
        calculate_per_token_loss="tokens" in case,
        check_for_nan_in_loss_and_grad=True,
        lora_rank=_lora_rank(case),
        lora_alpha=adapters.ALPHA,
        lora_dropout=0.0,
        lora_type="lora",
        lora_A_init_method="xavier",
        lora_B_init_method="zero",
        target_modules=list(adapters.TARGETS),
        log_probs_chunk_size=-1,
        **_loss(case),
        **_learning_rates(),
    )


def _lora_rank(case: set[str]) -> int:
    if "slots" in case:
        return adapters.SLOT_RANK
    return adapters.RANK if "lora" in case else 0


def _rollouts_per_step(case: set[str]) -> int:
    return _group(case) if "long" in case else ROLLOUTS_PER_STEP


def _group(case: set[str]) -> int:
    """Samples of one prompt."""
    return 8 if "long" in case else 4


def _model(case: set[str]) -> Any:
    from tests.dist import problem

    if "long" in case:
        return dataclasses.replace(
            problem.MODEL,
            num_layers=4,
            hidden_size=256,
            num_query_groups=4,
            ffn_hidden_size=768,
            init_std=0.02,
        )
    return problem.MOE_MODEL if "experts" in case else problem.MODEL


def _sizes(model: Any) -> dict[str, Any]:
    from tests.dist import problem

    return {
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_query_groups,
        "kv_channels": model.head_width,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_layers": model.num_layers,
        "vocab_size": problem.VOCAB_SIZE,
        "num_experts": None,
    }


def _loss(case: set[str]) -> dict[str, Any]:
    return {
        "loss_type": "policy_loss",
        "compute_advantages_and_returns": True,
        "normalize_advantages": "normalize" in case,
        "advantage_estimator": "ppo" if "ppo" in case else "grpo",
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "eps_clip": 0.2,
        "eps_clip_high": 0.28,
        "kl_coef": 0.0,
        "kl_loss_type": "k1",
        "entropy_coef": 0.0 if "experts" in case else 0.01,
        "gamma": 1.0,
        "lambd": 0.95,
    }


def _learning_rates() -> dict[str, Any]:
    return {
        "lr": LEARNING_RATE,
        "min_lr": LEARNING_RATE,
        "lr_decay_style": "constant",
        "lr_warmup_init": 0.0,
        "lr_warmup_iters": 0,
        "start_weight_decay": 0.0,
        "end_weight_decay": 0.0,
        "weight_decay_incr_style": "constant",
    }


def make_samples(sample_class: Any, arguments: Arguments) -> list[Any]:
    """What an engine would have generated: samples of the host's own class, with random tokens."""
    from tests.dist import problem

    case = words(arguments)
    rng = random.Random(problem.SEED)
    num_rollouts = _rollouts_per_step(case) * arguments.steps
    siblings = [rng.choice([1, 1, 2, 3]) if "fanout" in case else 1 for _ in range(num_rollouts)]
    samples: list[Any] = []
    prompt: list[int] = []
    for rollout, count in enumerate(siblings):
        reward = 0.0 if "experts" in case else rng.gauss(0.0, 1.0)
        if case & {"prompts", "long"} and rollout % _group(case) == 0:
            tokens = 512 if "long" in case else 14
            prompt = [rng.randrange(problem.VOCAB_SIZE) for _ in range(tokens)]
        for _ in range(count):
            length = min(120, max(6, int(rng.lognormvariate(3.2, 0.7))))
            if "short" in case:
                length = rng.randint(6, 16)
            response = rng.randint(1, length - 2)
            length = min(120, len(prompt) + length)
            if "long" in case:
                response, length = 512, 1024
            sample = sample_class(
                group_index=rollout // _group(case),
                index=len(samples),
                rollout_id=rollout,
                tokens=prompt
                + [rng.randrange(problem.VOCAB_SIZE) for _ in range(length - len(prompt))],
                response_length=response,
                reward=reward,
                # The answers of tools inside a response do not count; its last token does.
                loss_mask=[int(rng.random() < 0.8) for _ in range(response - 1)] + [1],
                status=sample_class.Status.COMPLETED,
                remove_sample="removed" in case and len(samples) % 7 == 3,
            )
            if "images" in case:
                number = len(samples)
                if "few" in case and number % 8:
                    number = images.WITHOUT
                add_images(sample, number, is_even="odd" not in case)
            samples.append(sample)
    return samples


def add_images(sample: Any, number: int, *, is_even: bool) -> None:
    """Put images before a sample's text.

    Args:
        is_even: of an even number of tokens, as slime's Qwen3.5 wants it.
    """
    tokens, inputs = images.draw_images(number)
    text = [min(token, images.START - 1) for token in sample.tokens[-60:]]
    if is_even and (len(tokens) + len(text)) % 2:
        text.insert(0, 1)
    sample.tokens = tokens + text
    sample.response_length = min(sample.response_length, len(sample.tokens) - len(tokens) - 1)
    sample.loss_mask = sample.loss_mask[-sample.response_length :]
    sample.multimodal_train_inputs = inputs


def build_host_chunks(
    arguments: Arguments, before_wrapping: Callable[[list[Any]], object] | None = None
) -> list[Any]:
    """This rank's chunks, with the settings that Megatron-LM's arguments give to the hosts."""
    from megapack.job.gpt import build
    from tests.dist import problem
    from tests.dist.setup import build_chunks

    case = words(arguments)
    settings = host_settings(arguments)
    if pattern := pattern_of(arguments.case):
        build.initialize_parallel(arguments.layout, problem.SEED)
        return mamba_chunks(settings, pattern)
    own = build.transformer_config

    def host_config(*args: Any, **kwargs: Any) -> Any:
        config = own(*args, **kwargs)
        for name, value in settings.items():
            setattr(config, name, value)
        return config

    build.transformer_config = host_config
    return build_chunks(arguments.layout, model=_model(case), before_wrapping=before_wrapping)


def host_settings(arguments: Arguments) -> dict[str, Any]:
    """What Megatron-LM's arguments set of its config."""
    case = words(arguments)
    overlaps = arguments.layout.vpp > 1 and "nooverlap" not in case
    return {
        "calculate_per_token_loss": "tokens" in case,
        "variable_seq_lengths": True,
        "overlap_p2p_comm": overlaps,
        "batch_p2p_comm": not overlaps,
        "deallocate_pipeline_outputs": True,
    }


def build_image_chunks(arguments: Arguments, make_model: Callable[..., Any]) -> list[Any]:
    """This rank's chunks of the host's own model with a tower."""
    from megapack.job.gpt import build
    from tests.dist import problem

    build.initialize_parallel(arguments.layout, problem.SEED)
    overlaps = {"overlap_grad_reduce": "reduce" in words(arguments)}
    settings = host_settings(arguments)
    return images.image_chunks(arguments.layout, settings, make_model, **overlaps)


def parallel_config(arguments: Arguments) -> dict[str, int]:
    """What these hosts tell the process that splits a rollout."""
    layout = arguments.layout
    return {
        "dp_size": layout.dp,
        "cp_size": layout.cp,
        "vpp_size": layout.vpp,
        "microbatch_group_size_per_vp_stage": layout.group_size if layout.vpp > 1 else 1,
    }


def make_optimizer(chunks: Sequence[Any]) -> Any:
    """Megatron's Adam, as the hosts make it."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam",
        lr=LEARNING_RATE,
        min_lr=LEARNING_RATE,
        weight_decay=0.0,
        clip_grad=1.0,
        use_distributed_optimizer=False,
    )
    return get_megatron_optimizer(config, list(chunks))


def observe(report: Report, chunks: Sequence[Any], model_module: Any) -> None:
    """Count exchanges of shapes, note the rows that the model trains on, and time the steps."""
    count_shape_exchanges(report)

    def note(chunk: Any, args: Any, kwargs: Any, output: Any) -> None:
        if chunk.training:
            report.row_tokens[-1].append(kwargs["input_ids"].shape[1])

    chunks[0].register_forward_hook(note, with_kwargs=True)
    count_layer_tokens(report, chunks[0])
    report.more["told"] = Told(chunks[0]).rows
    train_one_step = model_module.train_one_step

    def timed_step(*args: Any, **kwargs: Any) -> Any:
        report.row_tokens.append([])
        return timed(report, lambda: train_one_step(*args, **kwargs))

    model_module.train_one_step = timed_step


def note_forward(report: Report, run: Callable[[], Any]) -> Any:
    """Run the forward-only pass; notes its exchanges of shapes on their own."""
    result = run()
    report.more["forward_exchanges"] = report.num_shape_exchanges
    report.num_shape_exchanges = 0
    return result


def note_logprobs(
    report: Report, rollout_data: Any, num_samples: int, gather: Callable[..., Any]
) -> None:
    """Put the log-probs of this rank's samples in sample order; [] for those of other ranks.

    Args:
        gather: the host's function that joins the parts of context-parallel ranks.
    """
    if "log_probs" not in rollout_data:
        return
    report.logprobs = [[] for _ in range(num_samples)]
    fields = (rollout_data[name] for name in ("log_probs", "total_lengths", "response_lengths"))
    parts = zip(rollout_data["sample_indices"], *fields, strict=True)
    for index, values, total, response in parts:
        report.logprobs[int(index)] = gather(values, total, response).tolist()


def add_values(rollout_data: Any, cut: Callable[..., Any]) -> None:
    """What a critic would have said of each response token: numbers that the sample decides.

    Args:
        cut: the host's function that takes a context-parallel rank's part of a response.
    """
    import torch

    if "log_probs" not in rollout_data:
        return
    fields = (rollout_data[name] for name in ("total_lengths", "response_lengths"))
    rollout_data["values"] = [
        cut(torch.sin(torch.arange(response) + float(index)), total, response)
        for index, total, response in zip(rollout_data["sample_indices"], *fields, strict=True)
    ]


def note_advantages(report: Report, rollout_data: Any, gather: Callable[..., Any]) -> None:
    """The sum of each sample's advantages, by sample."""
    if "advantages" not in rollout_data:
        return
    fields = (rollout_data[name] for name in ("advantages", "total_lengths", "response_lengths"))
    report.more["advantages"] = {
        int(index): float(gather(values, total, response).sum())
        for index, values, total, response in zip(
            rollout_data["sample_indices"], *fields, strict=True
        )
    }


def note_reference(
    report: Report,
    args: Any,
    chunks: Sequence[Any],
    samples: Sequence[Any],
    part: Any,
    case: set[str],
) -> None:
    """Run the reference of the first step on the only rank's samples.

    Args:
        part: what the host hands to this rank.
    """
    from tests.hosts.steps.one_sample import one_sample_step

    rewards = dict(zip(part["sample_indices"], part["rewards"], strict=True))
    first = [sample for sample in samples if sample.rollout_id < args.global_batch_size]
    loss, grad_norm = one_sample_step(
        chunks[0],
        first,
        [float(rewards[sample.index]) for sample in first],
        per_token=args.calculate_per_token_loss,
        entropy_coef=args.entropy_coef,
    )
    report.more["reference_loss"] = loss
    report.more["reference_grad_norm"] = grad_norm
    if "images" in case:
        report.more["reference_tower_gradients"] = images.gradients(chunks)
    # What the hosts divide by under `tokens`, over what they should divide by.
    num_tokens = sum(sum(sample.loss_mask) for sample in first)
    num_removed = sum(sample.remove_sample for sample in first)
    report.more["removed_share"] = num_tokens / (num_tokens + num_removed)


def slots_reference(
    arguments: Arguments, args: Any, chunks: Sequence[Any], samples: Sequence[Any], part: Any
) -> None:
    """Write the gradients of one sample at a time, each with its adapter alone.

    The host adds up samples' gradients with weight 1, whatever their number.
    """
    import torch
    from megatron.bridge.peft.multi_lora_layers import set_tokens_per_adapter_slot

    from tests.hosts.steps.one_sample import one_sample_step

    slots = iter([sample.adapter.slot for sample in samples])

    def tell(chunk: Any, inputs: Any, kwargs: Any) -> None:
        counts = torch.zeros(adapters.NUM_SLOTS, dtype=torch.int32)
        counts[next(slots)] = kwargs["input_ids"].numel()
        set_tokens_per_adapter_slot(list(chunks), counts)

    hook = chunks[0].register_forward_pre_hook(tell, with_kwargs=True)
    rewards = dict(zip(part["sample_indices"], part["rewards"], strict=True))
    one_sample_step(
        chunks[0],
        samples,
        [float(rewards[sample.index]) for sample in samples],
        per_token=False,
        entropy_coef=args.entropy_coef,
    )
    hook.remove()
    num_rollouts = len({sample.rollout_id for sample in samples})
    for param in (param for chunk in chunks for param in chunk.parameters()):
        if param.requires_grad:
            param.main_grad *= num_rollouts
    adapters.keep_gradients(chunks, arguments.folder / "reference.pt")
    chunks[0].zero_grad_buffer()


def note_result(report: Report, chunks: Sequence[Any], logged: Sequence[dict[str, Any]]) -> None:
    """What training left: the logged losses and gradient norms, the weights, the gradients."""
    report.losses = [float(step["train/loss"]) for step in logged]
    report.grad_norms = [float(step["train/grad_norm"]) for step in logged]
    params = [param for chunk in chunks for param in chunk.parameters()]
    report.params_sum = sum(param.double().abs().sum().item() for param in params)
