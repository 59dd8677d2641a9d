"""Runs models with images on this rank; rank 0 compares them with transformers.

torchrun --nproc-per-node 2 -m tests.dist.vision.vision_worker FOLDER OUT CASE ...

Gradients are written over the weights and exported, so that they have the folder's names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapack import launch
from megapack.dp_schedule import build_dp_schedule
from megapack.errors import MegapackError
from megapack.images import ImageRef
from megapack.job.config.model import ModelConfig
from megapack.job.config.sections import OptimConfig
from megapack.job.gpt import build_model, build_vision, initialize_parallel
from megapack.job.gpt.optimizer import build_optimizer
from megapack.job.gpt.settings import reduction_settings
from megapack.job.hf import export_hf, load_hf_weights
from megapack.loss import SFT
from megapack.policy import Policy
from megapack.prefixes import SharedPrefixes
from megapack.rows import packing
from megapack.schedule import ScheduleAdapter, ahead
from tests.dist.executor import executor
from tests.dist.groups import end_model_parallel
from tests.dist.hf.hf_worker import read, show_gradients
from tests.dist.problem import COST
from tests.dist.setup import on_kernels_of_job
from tests.dist.vision.vision_cases import ALL_CASES, ROWS, VisionCase
from tests.dist.vision.vision_samples import make_batch, make_samples

PARTS = {"deepstack": "deepstack", "merger": "merger", "tower": "visual."}
"""Part of a model -> what names of its tensors have in them; all others are the decoder's."""


def run_case(case: VisionCase, folder: Path, device: torch.device) -> dict[str, Any]:
    """Load a model, run a forward pass and a step; returns errors and facts on rank 0."""
    source = folder / case.family
    keys: dict[str, Any] = {"recompute": case.recompute, "freeze": case.freeze}
    keys["vision"] = "frozen" if case.trained == "frozen" else "train"
    if "moe" in case.family:
        keys["moe_balance_loss_coef"] = 0.0
    model = on_kernels_of_job(ModelConfig.from_hf(str(source), **keys))
    assert model.vocab_size is not None
    layout, own = case.layout, ROWS[case.rows]
    initialize_parallel(layout, seed=1)
    optim = OptimConfig(distributed_optimizer=False, overlap_grad_reduce=case.text_step)
    chunks = build_model(
        model,
        layout,
        vocab_size=model.vocab_size,
        seed=1,
        distributed_optimizer=False,
        reduction=reduction_settings(optim, layout),
        splits_backward=own.policy.backward == "split",
    )
    tower = build_vision(model, distributed_optimizer=False)
    load_hf_weights([*chunks, tower], source, device=device)
    adapter = ScheduleAdapter(
        chunks, layout=layout, logprob_chunk_tokens=16, executor=executor(), vision=tower
    )
    samples = make_samples(case.samples)
    batch = make_batch(samples)
    prefixes = None
    if own.shares:
        images = None if case.mutation == "token_prefixes" else [one.refs for one in samples]
        prefixes = SharedPrefixes.from_samples([one.ids for one in samples], images=images)
    if case.waves:
        tower.module.call_patches = 32
    options: dict[str, Any] = {
        "layout": layout,
        "prefixes": prefixes,
        "images": [batch.images(i) for i in range(len(batch))],
        "cost": dataclasses.replace(COST, fixed=1.0),
    }
    plan = build_dp_schedule(
        batch.lengths, max_tokens_per_gpu=own.max_tokens, policy=own.policy, **options
    )
    # A pass without backwards has no pieces; layers that put off weight gradients are operations.
    policy = own.policy if case.rows == "split" else Policy()
    forward = build_dp_schedule(
        batch.lengths, max_tokens_per_gpu=96, forward_only=True, policy=policy, **options
    )
    outputs = adapter.forward(forward, batch)["logprobs"]
    optimizer = build_optimizer(optim, chunks, bf16=False, vision=tower)
    for module in adapter.modules:
        if hasattr(module, "zero_grad_buffer"):
            module.zero_grad_buffer()
    step = adapter.step(plan, batch, objective=SFT())
    facts: dict[str, Any] = {"loss": step.loss}
    if case.text_step:
        facts["tower_of_text"] = _text_step(adapter)
    exported = folder / "gradients" / case.name
    exported.parent.mkdir(exist_ok=True)
    facts["norm"] = _norm(optimizer)
    kept = [param for module in adapter.modules for param in module.parameters()]
    for param in kept:
        if getattr(param, "main_grad", None) is None:
            param.main_grad = torch.zeros_like(param)
    show_gradients(adapter.modules)
    export_hf(adapter.modules, exported, like=source, device=device)
    if dist.get_rank():
        return {}
    want = torch.load(folder / f"{case.family}.pt")[case.samples]
    rows = [row for rank in plan.steps[0].ranks for row in rank]
    pairs = zip(outputs, want["logprobs"], strict=True)
    differences = torch.cat([(o - w).abs() for o, w in pairs if o is not None])
    return {
        **facts,
        "logprobs_max_error": float(differences.max()),
        "logprobs_mean_error": float(differences.sum() / sum(batch.num_loss_tokens)),
        "loss_error": abs(step.loss - want["loss"]),
        **_gradient_errors(read(exported), want["gradients"], facts["norm"]),
        "shared_tokens": sum(row.shared_tokens for row in rows),
        "num_pieces": sum(len(row.pieces) for row in rows),
        "most_ranks": max(row.width for row in rows),
        "num_rows": len(rows),
    }


def _norm(optimizer: Any) -> float:
    """The norm that the optimizer clips by."""
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def _text_step(adapter: ScheduleAdapter) -> float:
    """A step without images; the largest gradient of the tower. Gradients are put back."""
    kept = [
        (param, param.main_grad.clone())
        for module in adapter.modules
        for param in module.parameters()
    ]
    few = make_samples("few")
    batch = make_batch([few[0], few[2]])
    plan = build_dp_schedule(batch.lengths, layout=adapter.layout, max_tokens_per_gpu=96, cost=COST)
    for module in adapter.modules:
        module.zero_grad_buffer()
    adapter.step(plan, batch, objective=SFT())
    found = max(float(p.main_grad.abs().max()) for p in adapter.modules[-1].parameters())
    for param, grad in kept:
        param.main_grad.copy_(grad)
    return found


def _gradient_errors(
    got: dict[str, Tensor], want: dict[str, Tensor], norm: float
) -> dict[str, Any]:
    """Relative differences: of the worst tensor of each part, and of the norm."""
    missing = sorted(want.keys() - got.keys())
    assert not missing, missing
    found: dict[str, float] = {}
    squares = differences = 0.0
    for name, true in want.items():
        if not got[name].any():
            # Frozen, or an expert that no token chose.
            continue
        part = next((part for part, text in PARTS.items() if text in name), "decoder")
        difference = float((got[name].double() - true).norm())
        found[part] = max(found.get(part, 0.0), difference / float(true.norm()))
        differences += difference**2
        squares += float(true.square().sum())
    return {
        "gradients": found,
        "gradient_error": (differences / squares) ** 0.5,
        "worst_tensor_error": max(found.values()),
        "norm_error": abs(norm / squares**0.5 - 1),
    }


@contextlib.contextmanager
def mutated(name: str) -> Iterator[None]:
    """Within the block megapack does what the mutation says."""
    with contextlib.ExitStack() as stack:
        if name:
            stack.enter_context(_MUTATIONS[name]())
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _one_key() -> Any:
    """Two images of one size have one key."""
    true = packing.SampleBatch.images

    def images(self: Any, sample: int) -> Any:
        return tuple(
            dataclasses.replace(ref, key="image 5") if ref.grid == (1, 6, 8) else ref
            for ref in true(self, sample)
        )

    return _replaced(packing.SampleBatch, "images", images)


def _closure() -> Any:
    """Features keep the tower's graph, and layers read them as they are."""

    def tables(self: Any, images: Any, own: Any) -> Any:
        order = images.needs[0]
        values = torch.cat([own[i] for i in order], dim=1)
        starts, at = {}, 0
        for i in order:
            starts[images.refs[i].key] = at
            at += images.refs[i].tokens
        return dict(enumerate(values)), starts

    def put(self: Any, level: int, hidden: Tensor) -> Tensor:
        if level not in self.table.values:
            return hidden
        values = self.table.values[level][self.index_P][:, None]
        if level:
            return hidden.index_add(0, self.positions_P, values)
        return hidden.index_copy(0, self.positions_P, values)

    stack = contextlib.ExitStack()
    stack.enter_context(_replaced(ahead.Ahead, "_tables", tables))
    stack.enter_context(_replaced(ahead.RowFeatures, "put", put))
    stack.enter_context(_replaced(ahead.Ahead, "backward", lambda self, *_: None))
    return stack


def _overwrite() -> Any:
    """A rank knows the levels of its last chunk only."""
    true = ahead.levels_of
    return _replaced(ahead, "levels_of", lambda chunks, num: true(chunks[-1:], num))


def _giving_back(gives_back: Any) -> Any:
    """The ranks for which this is true give gradients back."""
    true = ahead.Ahead.prepare

    def prepare(self: Any, *args: Any) -> Any:
        pairs = enumerate(self._ranks)
        self._ranks = [one._replace(gives_back=gives_back(rank)) for rank, one in pairs]
        self._own = self._ranks[dist.get_rank()]
        return true(self, *args)

    return _replaced(ahead.Ahead, "prepare", prepare)


def _no_sum_over_tp() -> Any:
    """Only the first tensor-parallel rank's gradients count, though each has its own tokens'."""
    return _giving_back(lambda rank: rank == 0)


def _counted_per_tp_rank() -> Any:
    """All tensor-parallel ranks give back the same gradient."""
    return _giving_back(lambda rank: True)


def _average_over_tp() -> Any:
    """The sum over tensor-parallel ranks is divided by their number."""
    true = ahead.Ahead._gradient
    return _replaced(
        ahead.Ahead, "_gradient", lambda self, encoded, ref: true(self, encoded, ref) / 2
    )


def _inv_freq() -> Any:
    """Rotary frequencies of the tower are not initialised."""
    true = ahead.VisionTower.encode

    def encode(self: Any, *args: Any) -> Any:
        self.visual.rotary_pos_emb.inv_freq.fill_(0.1)
        return true(self, *args)

    return _replaced(ahead.VisionTower, "encode", encode)


def _rotary_by_index() -> Any:
    """Tokens have their index in the sample as position."""

    def positions(refs: Any, length: int) -> Any:
        return torch.arange(length)[:, None].expand(length, 3).numpy()

    return _replaced(packing, "positions", positions)


def _rotary(interleaved: bool) -> Any:
    true = ahead.RowImages

    def made(rotary_T3: Tensor, mrope: Any, features: Any) -> Any:
        return true(rotary_T3, dataclasses.replace(mrope, is_interleaved=interleaved), features)

    return _replaced(ahead, "RowImages", made)


def _cut_from_the_start() -> Any:
    """A piece of an image reads the image's first features."""
    true = packing._RowWriter.features

    def features(self: Any, images: Any) -> Tensor:
        found = true(self, images)
        held = (found >= 0).nonzero()[:, 0]
        if held.numel() and images:
            found[held] -= found[held].min()
        return found

    return _replaced(packing._RowWriter, "features", features)


def _piece_without_images() -> Any:
    """A row without image tokens has plain positions, though an image is in an earlier piece."""
    true = packing.pack_row

    def pack_row(*args: Any, **kwargs: Any) -> Any:
        row = true(*args, **kwargs)
        if row.images:
            return row
        return dataclasses.replace(row, features_T=None, rotary_T3=None)

    from megapack.schedule import packer

    return _replaced(packer, "pack_row", pack_row)


def _levels_swapped() -> Any:
    """DeepStack's levels are added in the other order."""
    true = ahead.VisionTower.forward
    return _replaced(ahead.VisionTower, "forward", lambda self, *args: true(self, *args)[[0, 2, 1]])


def _no_windows() -> Any:
    """Layers with windows attend to whole images."""
    true = ahead.VisionTower.encode

    def encode(self: Any, refs: list[ImageRef], *args: Any) -> Any:
        self.visual.fullatt_block_indexes = list(range(len(self.visual.blocks)))
        return true(self, refs, *args)

    return _replaced(ahead.VisionTower, "encode", encode)


_MUTATIONS = {
    "one_key": _one_key,
    "token_prefixes": contextlib.nullcontext,
    "closure": _closure,
    "overwrite": _overwrite,
    "no_sum_over_tp": _no_sum_over_tp,
    "average_over_tp": _average_over_tp,
    "counted_per_tp_rank": _counted_per_tp_rank,
    "inv_freq": _inv_freq,
    "rotary_by_index": _rotary_by_index,
    "rotary_in_blocks": lambda: _rotary(False),
    "rotary_interleaved": lambda: _rotary(True),
    "cut_from_the_start": _cut_from_the_start,
    "piece_without_images": _piece_without_images,
    "levels_swapped": _levels_swapped,
    "no_windows": _no_windows,
}


def main(folder: str, out: str, *names: str) -> None:
    """Run the cases; all have the same number of processes."""
    device = launch.start("cpu")
    results = {}
    for name in names:
        case = ALL_CASES[name]
        try:
            with mutated(case.mutation):
                results[name] = run_case(case, Path(folder), device)
        except (MegapackError, RuntimeError) as error:
            if not case.mutation:
                raise
            results[name] = {"raised": str(error)}
        end_model_parallel()
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(results), encoding="utf-8")
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
