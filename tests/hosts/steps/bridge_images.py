"""Images in Megatron-Bridge's recipe: its own Qwen3-VL and forward step, samples with pixels."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from megapack import Layout
from tests.dist import problem
from tests.hosts.steps import images

NUM_LAYERS = 4
SEQ_LENGTH = 96
# Of the tokenizer in the folder of the recipe's model.
VOCAB_SIZE = 300
MICRO_BATCH = 2


@dataclasses.dataclass(frozen=True)
class ImageSample:
    """A sample's tokens with their loss mask, and its images."""

    tokens: list[int]
    mask: list[int]
    inputs: dict[str, Any] | None

    @classmethod
    def draw(cls, number: int) -> ImageSample:
        source = random.Random(number)
        seen, inputs = images.draw_images(number)
        question, answer = (
            [source.randrange(1, images.START) for _ in range(source.randint(*sizes))]
            for sizes in ((3, 8), (4, 30))
        )
        mask = [0] * (len(seen) + len(question) - 1) + [1] * len(answer)
        return cls([*seen, *question, *answer], [*mask, 0], inputs)


def set_model(cfg: Any, layout: Layout, case: set[str]) -> None:
    """Bridge's Qwen3-VL and these samples, in place of the recipe's model and data."""
    from megatron.bridge.data.base import DatasetProvider
    from megatron.bridge.models.qwen_vl.qwen3_vl_provider import Qwen3VLModelProvider
    from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

    class Provider(Qwen3VLModelProvider):  # type: ignore[misc]
        def provide(
            self, pre_process: Any = None, post_process: Any = None, vp_stage: Any = None
        ) -> Any:
            """As the base class; with the stage's number, which Bridge leaves out."""
            from megatron.bridge.models.qwen_vl import qwen3_vl_provider as module

            own = module.Qwen3VLModel
            if "unpatched" not in case:
                module.Qwen3VLModel = lambda **fields: own(vp_stage=vp_stage, **fields)
            try:
                return super().provide(pre_process, post_process, vp_stage)
            finally:
                module.Qwen3VLModel = own

    class Data(list[ImageSample]):
        def collate_fn(self, samples: list[ImageSample]) -> dict[str, Any]:
            return collated(samples, GenericVisualInputs)

    class Provided(DatasetProvider):  # type: ignore[misc]
        seq_length = SEQ_LENGTH
        enable_in_batch_packing = True
        skip_getting_attention_mask_from_dataset = True

        def build_datasets(self, context: Any) -> tuple[Any, Any, None]:
            counts = (context.train_samples, context.valid_samples)
            return (*(Data(ImageSample.draw(i) for i in range(count)) for count in counts), None)

    model = problem.MODEL
    old = cfg.model
    same = ("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size")
    same += ("pipeline_dtype", "overlap_p2p_comm", "batch_p2p_comm", "deallocate_pipeline_outputs")
    cfg.model = Provider(
        **{name: getattr(old, name) for name in same},
        num_layers=NUM_LAYERS,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.head_width,
        ffn_hidden_size=model.dense_width,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        gated_linear_unit=True,
        add_bias_linear=False,
        vocab_size=VOCAB_SIZE,
        seq_length=SEQ_LENGTH,
        mrope_section=images.MROPE_SECTION,
        rotary_base=10000.0,
        share_embeddings_and_output_weights=True,
        calculate_per_token_loss=True,
        cross_entropy_loss_fusion=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        spatial_merge_size=images.MERGE,
        deepstack_visual_indexes=[0],
        vision_config=Qwen3VLVisionConfig(
            **images.VISION_CONFIG,
            out_hidden_size=model.hidden_size,
            deepstack_visual_indexes=[0],
        ),
        **images.TOKENS,
    )
    cfg.model.register_pre_wrap_hook(
        lambda chunks: [images.draw_weights(chunk) for chunk in chunks] and chunks
    )
    cfg.dataset = Provided(num_workers=0, persistent_workers=False, pin_memory=False)
    cfg.dataset.dataloader_type = "single"
    cfg.train.micro_batch_size = MICRO_BATCH


def collated(samples: list[ImageSample], visual_inputs: Any) -> dict[str, Any]:
    """A micro-batch for Bridge's step: samples padded to the longest."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    def padded(rows: list[list[int]], fill: int = 0) -> Any:
        return pad_sequence([torch.tensor(row) for row in rows], True, fill)

    tokens = padded([sample.tokens for sample in samples])
    seen = [sample.inputs for sample in samples if sample.inputs]
    return {
        "tokens": tokens,
        "labels": padded([[*sample.tokens[1:], -100] for sample in samples], -100),
        "loss_mask": padded([sample.mask for sample in samples]).float(),
        "position_ids": torch.arange(tokens.shape[1]).expand_as(tokens),
        "visual_inputs": visual_inputs(
            **{name: torch.cat([one[name] for one in seen]) for name in (seen[0] if seen else ())}
        ),
    }


def one_sample_step(chunk: Any, count: int) -> tuple[float, dict[str, Any]]:
    """The loss and the tower's gradients of the first step, one unpadded sample at a time."""
    import torch

    chunk.zero_grad_buffer()
    samples = [ImageSample.draw(i) for i in range(count)]
    num_tokens = sum(sum(sample.mask) for sample in samples)
    total = 0.0
    for sample in samples:
        loss_1T = chunk(
            input_ids=torch.tensor([sample.tokens]),
            position_ids=None,
            attention_mask=None,
            labels=torch.tensor([[*sample.tokens[1:], 0]]),
            **(sample.inputs or {}),
        )
        loss = (loss_1T[0] * torch.tensor(sample.mask)).sum() / num_tokens
        loss.backward()
        total += float(loss)
    found = images.gradients([chunk])
    chunk.zero_grad_buffer()
    return total, found
