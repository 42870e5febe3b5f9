"""How far a run has come: everything about its progress that a checkpoint must remember."""

from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True)
class Counters:
    """step: applied optimizer steps; position: sequences consumed; tokens: tokens scored in training."""

    step: int = 0
    position: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    restarts: int = 0

    def after_step(self, sequences: int, tokens: int) -> "Counters":
        return replace(
            self, step=self.step + 1, position=self.position + sequences, tokens=self.tokens + tokens
        )

    def after_restart(self) -> "Counters":
        return replace(self, restarts=self.restarts + 1)

    def to_dict(self) -> dict[str, int]:
        return asdict(self)
