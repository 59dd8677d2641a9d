"""A GPT that adds projected pixels to the embeddings of image tokens; compared with one sample at a
time.

torchrun --nproc-per-node 2 -m tests.dist.rows.tensors_worker OUT
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from torch import Tensor

from megapack import DataError, Layout, build_dp_schedule, launch
from megapack.job.gpt import build_model, initialize_parallel, transformer_config
from megapack.job.gpt.init import initialize_by_name
from megapack.loss import SFT
from megapack.model.parameters import global_parameters
from megapack.samples import SampleBatch, TensorField
from megapack.schedule import ScheduleAdapter
from tests.dist import problem
from tests.dist.exactness.worker import gradient_errors
from tests.dist.groups import end_model_parallel

IMAGE = 99
"""The token at the position of an image patch."""
PATCH = (2, 3)
LAYOUTS = {
    2: {"pp2": Layout(pp=2), "dp2": Layout(dp=2), "pp2_vpp2": Layout(pp=2, vpp=2)},
    1: {"single": Layout()},
    4: {"dp2_pp2_vpp2": Layout(dp=2, pp=2, vpp=2)},
}


class PixelGPT(GPTModel):
    """A GPT whose `IMAGE` tokens have patches [k, 2, 3], in the order of the row."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.pre_process:
            self.projector = torch.nn.Linear(6, self.config.hidden_size, bias=False)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        pixels: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        embedded = None
        if self.pre_process and pixels is not None:
            embedded_S1H = self.embedding(input_ids=input_ids, position_ids=position_ids)
            positions = (input_ids[0] == IMAGE).nonzero()[:, 0]
            assert positions.numel() == pixels.shape[0]
            patches = self.projector(pixels.flatten(1))
            embedded = embedded_S1H.index_add(0, positions, patches[:, None])
        return super().forward(input_ids, position_ids, attention_mask, embedded, **more)


def make_batch() -> SampleBatch:
    """Samples with 0 to 5 patches."""
    generator = torch.Generator().manual_seed(problem.SEED)
    tokens = []
    pixels = []
    for i in range(10):
        ids = torch.randint(0, IMAGE, (6 + 5 * i % 23,), generator=generator)
        count = (i * 3) % 6
        ids[1 : 1 + count] = IMAGE
        tokens.append(ids)
        pixels.append(torch.randn(count, *PATCH, generator=generator))
    masks = {"response_mask": [ids != IMAGE for ids in tokens]}
    return SampleBatch(tokens, masks, tensors={"pixels": TensorField(pixels)})


def expected(batch: SampleBatch) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient of the stock attention, one sample at a time."""
    config = transformer_config(problem.MODEL, Layout())
    model = PixelGPT(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=config.normalization),
        vocab_size=128,
        max_sequence_length=4096,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    )
    initialize_by_name(
        [model],
        seed=problem.SEED,
        std=problem.MODEL.init_std,
        num_layers=problem.NUM_LAYERS,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
    )
    total = torch.zeros(())
    count = 0
    for i in range(len(batch)):
        ids = batch.tokens(i)
        pixels = batch.row_tensors([i])["pixels"]
        n = ids.numel()
        mask = torch.ones(n, n, dtype=torch.bool).triu(1)[None, None]
        assert isinstance(pixels, Tensor)
        logits = model(ids[None], torch.arange(n)[None], mask, pixels)[0, :-1]
        kept = batch.response_mask(i)[1:]
        logp = logits[:, : problem.VOCAB_SIZE].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        total = total - logp[kept].sum()
        count += int(kept.sum())
    (total / count).backward()
    grads = {n: p.grad.double().clone() for n, p in global_parameters(model)}
    return float(total.detach() / count), grads


def run(layout: Layout, batch: SampleBatch, reference: tuple[float, dict[str, Tensor]]) -> Any:
    """Run one step on a layout; returns its errors against the reference."""
    initialize_parallel(layout, problem.SEED)
    chunks = build_model(
        problem.MODEL,
        layout,
        vocab_size=problem.VOCAB_SIZE,
        seed=problem.SEED,
        distributed_optimizer=False,
        model_class=PixelGPT,
    )
    adapter = ScheduleAdapter(chunks, layout=layout)
    few = SampleBatch([[1, 2, 3]], tensors={"pixels": TensorField([torch.zeros(0, *PATCH)])})
    plan = build_dp_schedule(few.lengths, layout=layout, max_tokens_per_gpu=64)
    padding = sum(not row.samples for rank in plan.steps[0].ranks for row in rank)
    adapter.step(plan, few, objective=SFT())
    for chunk in chunks:
        chunk.zero_grad_buffer()
    plan = build_dp_schedule(batch.lengths, layout=layout, max_tokens_per_gpu=48)
    result = adapter.step(plan, batch, objective=SFT())
    names = [n for chunk in chunks for n, _ in global_parameters(chunk)]
    return {
        "loss": result.loss,
        "expected_loss": reference[0],
        "padding": padding,
        "projector": "projector.weight" in names,
        "error": _error_of_unknown_tensor(adapter),
        **gradient_errors(chunks, reference[1]),
    }


def _error_of_unknown_tensor(adapter: ScheduleAdapter) -> str:
    batch = SampleBatch([[1, 2, 3]], tensors={"audio": TensorField([torch.zeros(1)])})
    plan = build_dp_schedule(batch.lengths, layout=adapter.layout, max_tokens_per_gpu=64)
    try:
        adapter.step(plan, batch, objective=SFT())
    except DataError as error:
        return str(error)
    return ""


def main(out: str) -> None:
    """Run all layouts of this world size; every rank writes its own file."""
    launch.start("cpu")
    world = dist.get_world_size()
    batch = make_batch()
    results = {}
    for name, layout in LAYOUTS[world].items():
        initialize_parallel(Layout(dp=world), problem.SEED)
        reference = expected(batch)
        end_model_parallel()
        results[name] = run(layout, batch, reference)
        end_model_parallel()
    with open(f"{out}.{dist.get_rank()}", "w", encoding="utf-8") as file:
        json.dump(results, file)
    launch.stop()


if __name__ == "__main__":
    main(sys.argv[1])
