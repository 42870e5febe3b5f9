"""The runs of a sweep side by side: what varied, and what came of it. Imports no torch."""

import math
from dataclasses import dataclass
from pathlib import Path

from kvm_dist.exit_codes import ConfigError
from kvm_dist.load import leaves, load_config
from kvm_dist.metrics import METRICS_NAME, read_metrics

_PLACE = ("name", "run_root")  # differ by themselves


@dataclass(frozen=True)
class Member:
    """One run. values: of the keys that vary, in order; losses: the last ones, None before the first."""

    path: Path
    values: tuple[str, ...]
    step: int
    training_loss: float | None
    validation_loss: float | None

    @property
    def loss(self) -> float | None:
        """What runs are compared by: on held-out data once there is one."""
        return self.training_loss if self.validation_loss is None else self.validation_loss


def read_members(folder: Path) -> tuple[tuple[str, ...], list[Member]]:
    """The keys that vary, and the runs of the sweep in `folder`, best first, those without a loss last."""
    flat = {
        path.parent: leaves(load_config(path).config.model_dump(mode="json"))
        for path in sorted(folder.glob("*/config.yaml"))
    }
    if not flat:
        raise ConfigError(f"{folder}: no runs of a sweep; give the folder that `kvm-dist submit` named")
    keys = dict.fromkeys(key for values in flat.values() for key in values)
    varied = tuple(
        key
        for key in keys
        if key not in _PLACE and len({repr(values.get(key)) for values in flat.values()}) > 1
    )
    members = [
        _member(path, tuple(_text(values.get(key)) for key in varied)) for path, values in flat.items()
    ]
    return varied, sorted(members, key=lambda member: math.inf if member.loss is None else member.loss)


def _member(path: Path, values: tuple[str, ...]) -> Member:
    records = read_metrics(path / METRICS_NAME)

    def last(key: str) -> float | None:
        found = [record[key] for record in records if math.isfinite(record.get(key, math.nan))]
        return found[-1] if found else None

    step = int(records[-1]["step"]) if records else 0
    return Member(path, values, step, last("train/loss"), last("validation/loss"))


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
