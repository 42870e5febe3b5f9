"""The training loop: steps, and what happens between them."""

from collections.abc import Callable, Iterator

from kvm_dist.checkpointing import CheckpointSaver
from kvm_dist.config import RunConfig
from kvm_dist.counters import Counters
from kvm_dist.data.loader import StepBatch
from kvm_dist.evaluate.session import Evaluation
from kvm_dist.exit_codes import Preempted
from kvm_dist.reporting import Reporter
from kvm_dist.step import StepOutcome, TrainStep


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
    ) -> None:
        self.config = config
        self.step = step
        self.batches = batches
        self.evaluation = evaluation
        self.checkpoints = checkpoints
        self.reporter = reporter
        self.should_stop = should_stop
        self.counters = counters

    def run(self) -> Counters:
        """Train to the end. Raises Preempted after a save when any rank was asked to stop."""
        while self.counters.step < self.config.train.steps:
            with self.reporter.waiting_for_data():
                batch = next(self.batches)
            outcome = self.step(batch.micro_batches, self.counters.step, self.should_stop())
            self.counters = self.counters.after_step(batch, outcome.tokens)
            self._between_steps(outcome)
        return self.counters

    def _between_steps(self, outcome: StepOutcome) -> None:
        step = self.counters.step
        finished = step == self.config.train.steps
        metrics = self.reporter.step_metrics(self.counters, outcome)
        if finished or step % self.config.evaluation.every_steps == 0:
            metrics |= self.evaluation.run(step)
        if finished or outcome.stop or step % self.config.checkpoint.every_steps == 0:
            metrics |= self.checkpoints.save(self.counters, metrics, final=finished)
        self.reporter.log(step, metrics)
        if outcome.stop and not finished:
            raise Preempted(
                f"stopped after step {step} as asked; saved, and the same command goes on from there"
            )
