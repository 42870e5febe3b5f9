"""How far a run has come: everything about its progress that a checkpoint must remember."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kvm_dist.data.loader import StepBatch


@dataclass(frozen=True)
class Counters:
    """step: applied optimizer steps; position: sequences consumed; tokens: tokens scored in training.

    skipped_steps: batches that were consumed without a step, since the run is better without them.
    rollbacks: how often the run went back to a checkpoint, and on behind such a batch.
    recent_losses: what the next loss is compared with, if it is.
    damaged: damaged shards met so far and the documents masked because of them.
    """

    step: int = 0
    position: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    rollbacks: int = 0
    restarts: int = 0
    recent_losses: tuple[float, ...] = ()
    damaged: Mapping[str, int] = field(default_factory=dict)

    def after_step(self, batch: StepBatch, tokens: int, recent_losses: tuple[float, ...] = ()) -> "Counters":
        return replace(
            self,
            step=self.step + 1,
            position=batch.position,
            tokens=self.tokens + tokens,
            recent_losses=recent_losses,
            damaged={**self.damaged, **batch.damaged},
        )

    def after_skip(self, batch: StepBatch) -> "Counters":
        """The batch is behind, the step still to be taken."""
        return replace(
            self,
            position=batch.position,
            skipped_steps=self.skipped_steps + 1,
            damaged={**self.damaged, **batch.damaged},
        )

    def after_rollback(self, batch: StepBatch, saved: "Counters") -> "Counters":
        """At the step of the checkpoint whose counters are `saved`, but behind the batch."""
        return replace(
            self,
            step=saved.step,
            position=batch.position,
            tokens=saved.tokens,
            rollbacks=self.rollbacks + 1,
            recent_losses=saved.recent_losses,
            damaged={**self.damaged, **batch.damaged},
        )

    def after_restart(self) -> "Counters":
        return replace(self, restarts=self.restarts + 1)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> "Counters":
        later: dict[str, Any] = {"rollbacks": 0, "recent_losses": ()}  # than the first checkpoints
        values = {key: (later | dict(state))[key] for key in cls.__dataclass_fields__}
        return cls(**{**values, "recent_losses": tuple(values["recent_losses"])})
