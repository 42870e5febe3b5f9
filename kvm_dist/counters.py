"""How far a run has come: everything about its progress that a checkpoint must remember."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kvm_dist.data.loader import StepBatch


@dataclass(frozen=True)
class Counters:
    """step: applied optimizer steps; position: sequences consumed; tokens: tokens scored in training.

    damaged: damaged shards met so far and the documents masked because of them.
    """

    step: int = 0
    position: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    restarts: int = 0
    damaged: Mapping[str, int] = field(default_factory=dict)

    def after_step(self, batch: StepBatch, tokens: int) -> "Counters":
        return replace(
            self,
            step=self.step + 1,
            position=batch.position,
            tokens=self.tokens + tokens,
            damaged={**self.damaged, **batch.damaged},
        )

    def after_restart(self) -> "Counters":
        return replace(self, restarts=self.restarts + 1)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> "Counters":
        return cls(**{key: state[key] for key in cls.__dataclass_fields__})
