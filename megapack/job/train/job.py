"""The main job: trains a Megatron-Core GPT on rollouts from files.

samples -> batches -> advantages, plan -> old and reference log-probs -> steps -> metrics

With a critic, advantages follow from its values after the log-probs, and each step has two parts:
the policy's and the critic's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megapack import launch
from megapack.config.load import dump_yaml, to_dict
from megapack.cost.calibration import Calibration
from megapack.errors import RunInterrupted
from megapack.job.checkpoint.checkpoints import Checkpoints
from megapack.job.checkpoint.folders import Checkpoint, Position, drop_after
from megapack.job.checkpoint.state import RunState
from megapack.job.config.sections import TrainConfig, check_installed
from megapack.job.data.batches import (
    all_batches,
    batch_advantages,
    batch_rewards,
    open_dataset,
    steps_in,
)
from megapack.job.data.dataset import SampleNumbers
from megapack.job.data.gae import checked_rewards
from megapack.job.gpt import initialize_parallel
from megapack.job.gpt.optimizer import check_optimizer
from megapack.job.gpt.settings import reduction_settings
from megapack.job.hf import export_hf
from megapack.job.hf.output import small_files
from megapack.job.train.calibrator import Calibrator
from megapack.job.train.critic import FIELDS, REWARDS, Critic
from megapack.job.train.first_lines import first_lines, last_line
from megapack.job.train.folder import COST_FILE, RunFolder
from megapack.job.train.garbage import collect_after, collecting_every
from megapack.job.train.kernels import agreed_kernels
from megapack.job.train.learner import Learner, Update
from megapack.job.train.metrics import (
    Progress,
    StepClock,
    memory_peaks,
    plan_line,
    reset_memory_peaks,
)
from megapack.job.train.passes import BatchPlanner, PlannedBatch
from megapack.job.train.trace import StepTracer
from megapack.job.train.trackers import open_trackers
from megapack.loss.preference import PAIR_SIGN
from megapack.model import check_replicas
from megapack.model.speed import measured_speed
from megapack.outlook.stats import step_report
from megapack.outlook.warm_up import COMPILE_S, compile_planner
from megapack.pipeline.simulator import simulate_planned
from megapack.plan.facts import step_metrics
from megapack.ranks.agree import agree, agree_one_per_node_first, on_any_rank
from megapack.ranks.interrupt import Interrupt
from megapack.ranks.links import Ranks
from megapack.ranks.threads import run_on_daemon

# Seconds that the end of a run waits for a plan that has begun: planning 2,048 samples takes
# 0.02 s, and reading their tokens from a slow disk a few seconds. Chosen by hand.
_CLOSE_S = 5.0


def train(config: TrainConfig, interrupt: Interrupt) -> Path:
    """Run the main job on this rank; all ranks of the job call it.

    Args:
        interrupt: already entered: importing torch takes long, and a signal may arrive meanwhile.

    Returns:
        The run's folder, written by rank 0.

    Raises:
        MegapackError: on every rank. The message says what is wrong and what to set.
        RunInterrupted: on every rank, after one of them received SIGTERM or SIGUSR1 and the run was
            saved.
        KeyboardInterrupt: on Ctrl-C. The message names the last checkpoint.
    """
    # What the config alone says is refused before the ranks meet.
    config.checked_layout(launch.world_size())
    device = launch.start(config.device)
    ranks = trainer = None
    try:
        ranks = Ranks.start(config.watchdog, ends_process=True, interrupt=interrupt)
        with ranks.guarded():
            trainer = Trainer(config, device, interrupt, ranks)
            return trainer.run()
    except KeyboardInterrupt as error:
        error.args = error.args or (last_line(trainer),)
        raise
    finally:
        launch.stop(broken=ranks is not None and ranks.has_failed)


class Trainer:
    """The state of one run on one rank."""

    def __init__(
        self, config: TrainConfig, device: torch.device, interrupt: Interrupt, ranks: Ranks
    ) -> None:
        self.config = config
        self.layout = config.checked_layout(launch.world_size())
        self.device = device
        self.interrupt = interrupt
        self.ranks = ranks
        agree(lambda: check_installed(config.train.trackers), device=device)
        agree(lambda: check_optimizer(config.optim), device=device)
        cost = agree(lambda: config.cost_model(self.layout), device=device)
        agree(lambda: None, device=device, same={"cost model": repr(cost)})
        with ranks.guarded("the first plan", predicted_s=COMPILE_S):
            ranks.place.enter("compile")
            agree(lambda: compile_planner([config.plan.to_policy()]), device=device)
        self.data = agree_one_per_node_first(lambda: open_dataset(config), device=device)
        data_digest = self.data.digest()
        # The file may have been written again between two nodes' reads.
        agree(lambda: None, device=device, same={"digest of the samples": data_digest})
        self.reduction = agree(lambda: reduction_settings(config.optim, self.layout), device=device)
        self.kernels = agreed_kernels(config, self.layout, device=device)
        # All models of the run are built with the kernel that was agreed on.
        model = dataclasses.replace(config.model, attention=self.kernels.attention)
        built = dataclasses.replace(config, model=model)
        self.cost_basis = config.cost_basis
        if config.measures_speed:
            speed = measured_speed(
                model, dtype=model.dtype, tp=self.layout.tp, kernel=self.kernels.attention
            )
            self.cost_basis = f"from the model's sizes; {speed.basis}"
            cost = agree(lambda: config.cost_from_sizes(self.layout, speed), device=device)
        initialize_parallel(self.layout, config.seed)
        hf_path = config.model.hf_path
        if hf_path is not None and config.train.export_hf is not None:
            # What an export would refuse after the last step.
            agree(lambda: small_files(Path(hf_path)), device=device)
        self.policy = Learner(
            built, self.layout, reduction=self.reduction, ranks=ranks, device=device
        )
        self.chunks = self.policy.chunks
        self.adapter = self.policy.adapter
        self.passes = self.policy.passes
        self.planner = BatchPlanner(
            config.row_plan,
            self.layout,
            cost,
            self.data,
            self.adapter.dp_rank,
            replays_rollouts=config.train.routing_replay == "rollout",
            mtp_num_layers=config.model.mtp_num_layers,
            token_columns=config.objective.token_columns,
            ahead=self.adapter.runner.ahead,
            has_logprobs=bool(self.passes.logprob_fields),
        )
        self.calibrator = Calibrator(config.plan, self.adapter, self.layout, cost, ranks, device)
        # The next batch, which a thread plans; and the seconds that it took for this one.
        self._ahead: Future[tuple[PlannedBatch, float]] | None = None
        self._ahead_s = 0.0
        self.critic: Critic | None = None
        if config.critic.enabled:
            self.critic = Critic(
                built, self.layout, self.policy.modules, self.data, self.reduction, ranks, device
            )
        # Whether the cost model that the run begins with was measured.
        self.is_measured = config.plan.cost_model is not None
        self.clock = StepClock(is_calibrated=self.is_measured)
        self.tracer = StepTracer(
            self.adapter, config.train.trace_steps, is_calibrated=self.is_measured
        )
        self.position = Position()
        self.resumed: Checkpoint | None = None
        self._last: PlannedBatch | None = None
        self._stopping = False
        # Steps at the last export; -1 = none yet.
        self._exported_at = -1
        reference, critic = self.passes.reference, self.critic
        self.checkpoints = Checkpoints(
            config=config,
            layout=self.layout,
            state=RunState(
                self.policy.modules,
                self.policy.optimizer,
                None if reference is None else reference.initial,
                None if critic is None else RunState(critic.modules, critic.optimizer),
            ),
            data_digest=data_digest,
            device=device,
        )

    def run(self) -> Path:
        """Train on all batches of all epochs and return the run's folder."""
        config = self.config
        self.resumed = self.checkpoints.find()
        # Load before the folder is opened, so that a failed resume changes no file.
        if self.resumed is not None:
            self.position = self.checkpoints.load(self.resumed, self._saved_fields)
        check_replicas(self.policy.modules, device=self.device)
        if self.critic is not None:
            check_replicas(self.critic.modules, device=self.device)
        self.folder = agree(self._open_folder, device=self.device)
        self.progress = Progress(
            active=dist.get_rank() == 0, log_interval=config.train.log_interval
        )
        for line in first_lines(self):
            self.progress.line(line)
        try:
            with collecting_every(config.train.manual_gc_interval):
                for numbers, following in self._batches():
                    self._train_on(numbers, following)
            if config.train.save_interval is not None and self._last is not None:
                self._save(self._last)
            self._finish_save()
            if config.train.export_hf is not None:
                self._export()
            agree(self._close_folder, device=self.device)
        finally:
            if self._ahead is not None:
                wait([self._ahead], _CLOSE_S)
            self.progress.close()
            self.checkpoints.abandon()
            # The folder is still open only after an error. That error says more than one from
            # closing would.
            with contextlib.suppress(Exception):
                self._close_folder()
        path = Path(config.runs_dir) / config.name
        self.progress.line(f"{self.num_steps} steps; wrote {path}")
        return path

    @property
    def num_steps(self) -> int:
        """Optimizer steps since the run began."""
        return self.position.num_steps

    @property
    def _saved_fields(self) -> list[str]:
        """Fields that the weights at a batch's start gave, which its later steps read."""
        names = self.passes.logprob_fields
        return names if self.critic is None else [*names, *FIELDS]

    def _open_folder(self) -> RunFolder | None:
        """Open the run's folder on rank 0: the existing one if the run resumes its own checkpoint,
        else a new one."""
        if dist.get_rank() != 0:
            return None
        config = self.config
        saved = self.resumed
        own = saved if saved is not None and self.checkpoints.is_own(saved) else None
        done = None if own is None else self.num_steps
        folder = RunFolder(config.runs_dir, config.name, continue_after=done)
        # Only with the folder's lock: another run may be using these checkpoints.
        if own is not None:
            drop_after(own.path.parent, self.num_steps)
        folder.write_text("config.yaml", dump_yaml(config))
        folder.trackers = open_trackers(
            config.train.trackers, folder.path, to_dict(config), continue_after=done
        )
        return folder

    def _close_folder(self) -> None:
        folder, self.folder = self.folder, None
        if folder is not None:
            with contextlib.closing(folder):
                if self.calibrator.num_fits:
                    fitted = Calibration(cost=self.calibrator.cost)
                    folder.write_text(COST_FILE, dump_yaml(fitted))

    def _batches(self) -> Iterator[tuple[SampleNumbers, SampleNumbers | None]]:
        """The run's remaining batches in order, each with the one after it; sets up the learning
        rate schedule first."""
        config, data = self.config, self.data
        total_steps = sum(
            steps_in(config, data, batch) for _, _, batch in all_batches(config, data)
        )
        self.progress.expect(total_steps, self.num_steps)
        warmup = min(config.critic.warmup_steps, total_steps - 1)
        self.policy.expect(total_steps - warmup, max(0, self.num_steps - warmup))
        if self.critic is not None:
            self.critic.expect(total_steps, self.num_steps)
        begin = (self.position.epoch, self.position.batch)
        left = (each for each in all_batches(config, data) if each[:2] >= begin)
        current = next(left, None)
        while current is not None:
            epoch, index, batch = current
            current = next(left, None)
            self.position = dataclasses.replace(self.position, epoch=epoch, batch=index)
            yield batch, None if current is None else current[2]

    def _train_on(self, numbers: SampleNumbers, following: SampleNumbers | None) -> None:
        """Plan a batch, compute what the objective reads, and take its optimizer steps.

        Args:
            following: the next batch, which is planned while the steps of this one run; None if
                there is none.
        """
        self._raise_if_stopping()
        started = time.perf_counter()
        with self.ranks.guarded(f"the plan of batch {self.position.batch}"):
            self.ranks.place.enter("plan")
            batch = agree(lambda: self._planned(numbers), device=self.device)
        planned = time.perf_counter()
        self.progress.line(plan_line(batch.plan))
        batch_seconds = {"plan_s": planned - started, "plan_ahead_s": self._ahead_s}
        # A fit may change it while the next batch is planned.
        self.planner = dataclasses.replace(self.planner, cost=self.calibrator.cost)
        if following is not None:
            # A daemon: a thread that waits for a lost file system must not keep the process.
            self._ahead = run_on_daemon("megapack-ahead", partial(self._timed, following))
        first_step = self.position.step_in_batch
        resumed = self._resumed_inside
        if resumed is not None:
            saved = resumed, batch.samples, batch.plan, self._saved_fields
            agree(lambda: self.checkpoints.load_batch(*saved), device=self.device)
        else:
            self.passes.add_logprobs(batch)
        passed = time.perf_counter()
        batch_seconds["logprob_pass_s"] = passed - planned
        if self.critic is not None:
            if resumed is None:
                self.critic.add_advantages(batch)
            batch_seconds["value_pass_s"] = time.perf_counter() - passed
        self._last = batch
        wants_save = False
        for index in range(first_step, len(batch.plan.steps)):
            if not wants_save:
                self._raise_if_stopping()
            self.interrupt.begin()
            self._step(batch, index, batch_seconds)
            wants_save |= self._stopping or self.checkpoints.due(self.num_steps)
            # Recorded experts are not saved, so such a batch runs to its end before.
            if self.config.train.routing_replay == "old_logprobs" and self.position.step_in_batch:
                continue
            if wants_save:
                self._save(batch)
                wants_save = False
                if self.config.train.export_hf == "checkpoints" and not self._stopping:
                    self._export()
            if self._stopping:
                self._finish_save()

    def _save(self, batch: PlannedBatch) -> None:
        with self.ranks.guarded(f"the checkpoint after step {self.num_steps}"):
            self.ranks.place.enter("checkpoint")
            self.checkpoints.save(self.position, batch.plan, batch.samples, self._saved_fields)

    def _finish_save(self) -> None:
        """Complete the pending save, if there is one."""
        with self.ranks.guarded("the pending checkpoint"):
            self.ranks.place.enter("checkpoint")
            self.checkpoints.finish()

    def _export(self) -> None:
        """Write the weights as a Hugging Face folder, if that has not been done after this step."""
        config = self.config
        if self._exported_at == self.num_steps:
            return
        assert config.model.hf_path is not None
        folder = Path(config.runs_dir) / config.name / "hf" / f"step-{self.num_steps:08d}"
        with self.ranks.guarded(f"the export after step {self.num_steps}"):
            self.ranks.place.enter("export")
            exported = export_hf(
                self.policy.modules,
                folder,
                like=config.model.hf_path,
                device=self.device,
                replace=True,
            )
        self._exported_at = self.num_steps
        self.progress.line(f"exported {exported}")

    def _planned(self, numbers: SampleNumbers) -> PlannedBatch:
        """The batch that `_prepare` has made ahead, or makes now, and its plan in the folder."""
        ahead, self._ahead = self._ahead, None
        batch, self._ahead_s = (self._prepare(numbers), 0.0) if ahead is None else ahead.result()
        if self.folder is not None:
            self.folder.write_plan(batch.plan, batch.cost, batch.samples.lengths)
        return batch

    def _timed(self, numbers: SampleNumbers) -> tuple[PlannedBatch, float]:
        """What `_prepare` makes, and the seconds that it takes."""
        began = time.perf_counter()
        return self._prepare(numbers), time.perf_counter() - began

    def _prepare(self, numbers: SampleNumbers) -> PlannedBatch:
        """Local work of a batch: tensors, advantages, and plans that are equal on all ranks.

        It may run on a thread while steps change the weights, the run's position and the cost model
        in force, so it reads none of these.
        """
        return self.planner.plan(numbers, self._fields(numbers))

    def _fields(self, numbers: SampleNumbers) -> dict[str, Any]:
        """What the objective reads of samples and the data has."""
        fields: dict[str, Any] = {}
        if self.critic is not None:
            fields[REWARDS] = checked_rewards(
                batch_rewards(self.config.objective, self.data, numbers)
            )
        elif "advantages" in self.passes.objective.required_fields:
            advantages = batch_advantages(self.config.objective, self.data, numbers)
            fields["advantages"] = torch.from_numpy(advantages).float()
        if PAIR_SIGN in self.passes.objective.required_fields:
            fields[PAIR_SIGN] = torch.tensor(self.data.pair_signs(numbers)).float()
        return fields

    @property
    def _resumed_inside(self) -> Checkpoint | None:
        """The checkpoint that was saved inside the current batch, from which the run resumed."""
        # Not 0 at a batch's start only in that batch.
        return self.resumed if self.position.step_in_batch else None

    def _step(self, batch: PlannedBatch, index: int, batch_seconds: dict[str, float]) -> None:
        """Take one optimizer step and write its line of metrics."""
        plan = batch.plan
        cost = self.calibrator.cost
        report = step_report(plan, plan.steps[index], cost)
        predicted_s = self.clock.predict(report.seconds)
        reset_memory_peaks()
        policy: Update | None = None
        # While the critic warms up, the policy has no metrics.
        of_policy: dict[str, Any] = {"updated": 0}
        if self.num_steps >= self.config.critic.warmup_steps:
            number = self.num_steps + 1
            tracing = self.tracer.step(plan, index, number, self.folder, cost)
            with tracing, self.calibrator.step(plan.steps[index], number) as messages:
                policy = self.policy.take_step(
                    batch,
                    index,
                    name=f"step {number}",
                    num_steps=self.num_steps,
                    predicted_s=predicted_s,
                )
            for message in messages:
                self.progress.line(message)
            simulated = report.seconds
            if self.calibrator.cost is not cost:
                # Seconds of the old model say nothing about the scale of the new one's.
                self.clock = StepClock(is_calibrated=self.is_measured)
                simulated = simulate_planned(plan, plan.steps[index], self.calibrator.cost).makespan
            self.clock.record(simulated, policy.measured_s)
            of_policy = {
                **policy.metrics,
                "step_predicted_s": predicted_s,
                **self.calibrator.metrics,
            }
        total_s = 0.0 if policy is None else policy.seconds
        of_critic: dict[str, Any] = {}
        critic_updated = False
        if self.critic is not None:
            trained = self.critic.step(
                batch, index, num_steps=self.num_steps, predicted_s=predicted_s
            )
            total_s += trained.seconds
            of_critic = trained.metrics
            critic_updated = trained.updated
        self.position = self.position.after_step(
            index + 1, len(plan.steps), policy is not None and policy.updated, critic_updated
        )
        self._write(
            {
                "step": self.num_steps,
                "plan_digest": plan.digest()[:12],
                **of_policy,
                **self._data_metrics(),
                **of_critic,
                **batch_seconds,
                **self.checkpoints.take_seconds(),
                **memory_peaks(),
                "tokens_per_second": report.tokens / total_s,
                "tokens_per_second_per_gpu": report.tokens / total_s / dist.get_world_size(),
                **step_metrics(report),
                "loss_tokens": sum(
                    batch.samples.num_loss_tokens[i] for i in plan.steps[index].kept_samples
                ),
            }
        )
        collect_after(self.num_steps, self.config.train.manual_gc_interval)

    def _data_metrics(self) -> dict[str, int]:
        dropped = {"num_dropped_groups": self.data.num_dropped_groups}
        return dropped if self.config.data.drop_equal_rewards else {}

    def _write(self, metrics: dict[str, Any]) -> None:
        """Write a line of metrics on rank 0, and complete a save whose files are on the disk.

        All ranks learn whether that failed, and whether any rank received a signal to stop.
        """

        def write() -> None:
            if self.folder is not None:
                self.folder.append_metrics(metrics)

        flags = [self.interrupt.noted, *self.checkpoints.status]
        agree(write, device=self.device)
        self._stopping, writing, failed = on_any_rank(flags, device=self.device)
        self.progress.step(self.num_steps, metrics)
        if self.checkpoints.is_pending and (failed or not writing):
            self._finish_save()

    def _raise_if_stopping(self) -> None:
        """Raise RunInterrupted after a signal; the run has been saved by then."""
        if self._stopping:
            agree(self._close_folder, device=self.device)
            raise RunInterrupted(
                f"a signal ended the run after step {self.num_steps}; it is saved: start it again "
                "with train.resume=auto"
            )
