"""One optimizer step: the same loss and the same gradients at every layout."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvm_dist.config import RunConfig
from kvm_dist.data.loader import MicroBatch
from kvm_dist.exit_codes import DataError, NotFinite
from kvm_dist.host_clock import HostClock
from kvm_dist.optim.schedule import group_rates, schedule_factor
from kvm_dist.sequence_split import SequenceSplit
from models.loss import IGNORED_LABEL, token_losses
from models.parameter_groups import ParameterGroup
from parallel import collectives
from parallel.engine.deepspeed import Engine


class StepDropped(NotFinite):
    """Every rank has dropped the step whole: training could go on without it.

    spike: whether the loss was too large; otherwise something was not finite.
    """

    def __init__(self, message: str, spike: bool = False) -> None:
        super().__init__(message)
        self.spike = spike


@dataclass(frozen=True)
class StepOutcome:
    """loss: mean over all valid tokens of the step, in nats; the same on every rank, as is `stop`.

    host_fraction: of forward and backward, in which this rank's host started work and did not wait for the
    device; None on a CPU.
    """

    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    stop: bool
    host_fraction: float | None = None


class TrainStep:
    """Forward and backward over the micro-batches, then one update or, if anything is not finite, none."""

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        groups: list[ParameterGroup],
        split: SequenceSplit,
        beat: Callable[[str], None] = lambda phase: None,
    ) -> None:
        """beat: told of every phase as it begins."""
        self.config = config
        self.engine = engine
        self.groups = groups
        self.split = split
        self.beat = beat
        self._host = HostClock(split.device)

    def __call__(
        self,
        batch: Sequence[MicroBatch],
        step: int,
        stop_requested: bool,
        loss_limit: float | None = None,
    ) -> StepOutcome:
        """Apply step `step` (0-based) from this data rank's micro-batches.

        Collective. Raises on all ranks, before anything has changed: NotFinite if the loss or a gradient is
        not finite on any rank or the loss is above `loss_limit` (StepDropped if another step may follow),
        DataError if no rank has a token to learn from.
        """
        begun = time.perf_counter()
        local = [
            (self.split.inputs(part.inputs, number), self.split.labels(part.labels, number))
            for number, part in enumerate(batch)
        ]
        self.beat("reduce")
        tokens = self._valid_tokens([labels for _, labels in local])
        if tokens == 0:  # an update from nothing would still decay the weights and move them on
            raise DataError(
                f"step {step + 1}: every token of the batch is masked, as in damaged shards; find them with "
                "`kvm-dist data check`, delete them and run `kvm-dist data prepare` again; the same command "
                "then goes on from the last checkpoint"
            )
        self._host.begin()
        loss, stop = self._backward(local, tokens, stop_requested, loss_limit)
        host_fraction = self._host.fraction()
        if not math.isfinite(loss) and self.config.train.not_finite == "halt":
            raise NotFinite(self._not_finite_message(step, f"the loss is {loss}"))
        self.beat("optimizer")
        rates = self._rates(step)
        result = self.engine.step([rate for rate, _ in rates], [decay for _, decay in rates])
        self.split.drain()
        if not result.applied and loss_limit is not None and loss_limit < loss < math.inf:
            raise StepDropped(self._spike_message(step, loss, loss_limit), spike=True)
        if not result.applied:
            what = f"the loss is {loss}, the gradient norm {result.gradient_norm}"
            raise StepDropped(self._not_finite_message(step, what))
        if not math.isfinite(loss):  # finite gradients of such a loss: the step cannot be taken back
            raise NotFinite(f"step {step + 1}: the loss is {loss}; start again from the last checkpoint")
        return StepOutcome(
            loss=loss,
            gradient_norm=result.gradient_norm,
            learning_rate=self.config.optimizer.learning_rate * self._factor(step),
            tokens=tokens,
            seconds=time.perf_counter() - begun,
            stop=stop,
            host_fraction=host_fraction,
        )

    def _valid_tokens(self, labels: list[Tensor]) -> int:
        counted = sum(int((part != IGNORED_LABEL).sum()) for part in labels)
        return int(collectives.sum(torch.tensor(counted, device=self.split.device)))

    def _backward(
        self,
        local: list[tuple[Tensor, Tensor]],
        tokens: int,
        stop_requested: bool,
        loss_limit: float | None,
    ) -> tuple[float, bool]:
        """The loss is normalised once, over the valid tokens of data x sequence x accumulation.

        One above `loss_limit` is known before its last gradients are added. These are made NaN then: what is
        not finite is what the engine takes back whole, at every stage.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.split.device)
        for forwards, backwards in self.split.rounds(len(local)):
            losses: dict[int, Tensor] = {}
            for number in forwards:
                self.beat("forward")
                losses[number] = self._loss_sum(*local[number], number)
            for number in sorted(losses):
                total += losses[number].detach()
            if len(local) - 1 in losses and loss_limit is not None:
                self.beat("reduce")
                with self._host.waiting():
                    too_much = float(collectives.sum(total.clone())) / tokens > loss_limit
                if too_much:
                    losses = {number: loss * math.nan for number, loss in losses.items()}
            for number in backwards:
                self.beat("backward")
                self.engine.backward(losses.pop(number) / tokens)
            self.split.release()
        self.beat("reduce")
        with self._host.waiting():
            shared = collectives.sum(torch.stack([total, total.new_tensor(float(stop_requested))]))
            loss_of_all, stop = shared.tolist()
        return loss_of_all / tokens, bool(stop)

    def _loss_sum(self, inputs: Tensor, labels: Tensor, micro_batch: int) -> Tensor:
        context, chunk = self.split.context(micro_batch), self.config.train.loss_chunk
        if chunk is not None:
            in_chunks: Tensor = self.engine.module(inputs, context, labels, chunk)
            return in_chunks
        # No name for the logits: the backward makes as many gradients, and need not find them there.
        return token_losses(self.engine.module(inputs, context), labels)[0]

    def _factor(self, step: int) -> float:
        return schedule_factor(self.config.schedule, step, self.config.train.steps)

    def _rates(self, step: int) -> list[tuple[float, float]]:
        factor = self._factor(step)
        return [
            group_rates(self.config.optimizer, factor, g.learning_rate_scale, g.weight_decay_scale)
            for g in self.groups
        ]

    def _spike_message(self, step: int, loss: float, limit: float) -> str:
        return (
            f"step {step + 1}: the loss is {loss:.4f}, above {limit:.4f}, which train.loss_spike takes for a "
            "spike after the losses before it; no rank has applied it"
        )

    def _not_finite_message(self, step: int, what: str) -> str:
        return (
            f"step {step + 1}: {what}; no rank has applied it and no checkpoint holds it. "
            "The same command goes on from the last checkpoint. Lower optimizer.learning_rate, lengthen "
            "schedule.warmup_steps or look at the data of this step"
        )
