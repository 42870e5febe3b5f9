"""The training loop: steps, and what happens between them."""

import logging
from collections.abc import Callable, Iterator

from kvm_dist.checkpointing import CheckpointSaver
from kvm_dist.config import RunConfig
from kvm_dist.counters import Counters
from kvm_dist.data.loader import StepBatch
from kvm_dist.dropped import Described
from kvm_dist.evaluate.session import Evaluation
from kvm_dist.exit_codes import NotFinite, Preempted, RunError
from kvm_dist.heartbeat import Heartbeat
from kvm_dist.loss_spike import loss_limit, remembered
from kvm_dist.reporting import Reporter
from kvm_dist.rollback import roll_back
from kvm_dist.step import StepDropped, StepOutcome, TrainStep

_log = logging.getLogger(__name__)


class Trainer:
    """Runs from `counters` to `train.steps`; every rank runs the same loop and takes the same decisions."""

    def __init__(
        self,
        config: RunConfig,
        step: TrainStep,
        batches: Iterator[StepBatch],
        evaluation: Evaluation,
        checkpoints: CheckpointSaver,
        reporter: Reporter,
        should_stop: Callable[[], bool],
        counters: Counters,
        heartbeat: Heartbeat,
        describe: Described,
    ) -> None:
        self.config = config
        self.step = step
        self.batches = batches
        self.evaluation = evaluation
        self.checkpoints = checkpoints
        self.reporter = reporter
        self.should_stop = should_stop
        self.counters = counters
        self.heartbeat = heartbeat
        self.describe = describe
        self._metrics: dict[str, float] = {}  # of the last step, which a save after a skipped one belongs to

    def run(self) -> Counters:
        """Train to the end. Raises Preempted after a save when any rank was asked to stop."""
        try:
            return self._run()
        except RunError:  # of all ranks: what the step before began to save must not be lost
            self.checkpoints.finish()
            raise

    def _run(self) -> Counters:
        while self.counters.step < self.config.train.steps:
            self.heartbeat.begin_step(self.counters.step + 1)
            with self.reporter.waiting_for_data():
                batch = next(self.batches)
            try:
                limit = loss_limit(self.config.train, self.counters.recent_losses)
                outcome = self.step(batch.micro_batches, self.counters.step, self.should_stop(), limit)
            except NotFinite as error:
                error.args = (f"{error}. {self.describe(self.counters.step + 1, batch, error)}",)
                if not isinstance(error, StepDropped):
                    raise
                self._go_on_without(batch, error)
                continue
            losses = remembered(self.config.train, self.counters.recent_losses, outcome.loss)
            self.counters = self.counters.after_step(batch, outcome.tokens, losses)
            self._between_steps(outcome)
        return self.counters

    def _go_on_without(self, batch: StepBatch, dropped: StepDropped) -> None:
        """Go on behind the batch, or raise what it was. All ranks come to the same end.

        Saved at once: a resume must not meet the batch again, which may be whole the next time.
        """
        train = self.config.train
        policy = train.loss_spike if dropped.spike else train.not_finite
        if policy == "halt":
            raise dropped
        before = self.counters.skipped_steps + self.counters.rollbacks
        if before >= train.not_finite_allowed:
            raise NotFinite(
                f"{dropped}. The run went on without {before} batches before: "
                f"train.not_finite_allowed={train.not_finite_allowed} is reached"
            ) from dropped
        if policy == "skip":
            self.counters = self.counters.after_skip(batch)
            _log.warning("%s. Its batch is skipped, the %d. so far", dropped, self.counters.skipped_steps)
        else:
            self._roll_back(batch, dropped)
        if self._metrics:
            self.heartbeat.beat("save")
            self.checkpoints.save(self.counters, self._metrics, last=False)

    def _roll_back(self, batch: StepBatch, dropped: StepDropped) -> None:
        self.heartbeat.beat("save")  # as long as a save, and no step
        try:
            saved = roll_back(self.checkpoints, self.config.seed)
        except NotFinite as nothing:
            raise NotFinite(f"{dropped}; {nothing}") from dropped
        _log.warning("%s. The run goes back to step %d and on behind its batch", dropped, saved.counters.step)
        self.counters = self.counters.after_rollback(batch, saved.counters)
        self._metrics = dict(saved.metrics)

    def _between_steps(self, outcome: StepOutcome) -> None:
        step = self.counters.step
        finished = step == self.config.train.steps
        self.heartbeat.beat("report")
        metrics = self.reporter.step_metrics(self.counters, outcome) | self.heartbeat.metrics()
        if finished or step % self.config.evaluation.every_steps == 0:
            self.heartbeat.beat("evaluate")
            metrics |= self.evaluation.run(step)
        if finished or outcome.stop or step % self.config.checkpoint.every_steps == 0:
            self.heartbeat.beat("save")
            metrics |= self.checkpoints.save(self.counters, metrics, last=finished or outcome.stop)
        else:
            metrics |= self.checkpoints.settle()
        self.reporter.log(step, metrics)
        self._metrics = metrics
        if outcome.stop and not finished:
            raise Preempted(
                f"stopped after step {step} as asked; saved, and the same command goes on from there"
            )
