"""Checkpoints as logged models of the store, by reference: found by their metrics, marked once deleted."""

from pathlib import Path
from typing import Any

from kvm_dist.checkpoint.manifest import MANIFEST_NAME
from kvm_dist.tracking.events import Event
from kvm_dist.tracking.protocol import Point, Store
from kvm_dist.tracking.sent import Sent

STATUS_TAG = "checkpoint_status"
PRESENT, DELETED = "present", "deleted"
RANKING_METRICS = "validation/"  # what a checkpoint is judged by
_FIELDS = ("path", "step", "manifest_sha256", "bytes")


def reference(event: Event) -> dict[str, Any]:
    """What the store is told of a checkpoint: where it lies and how it is known again."""
    return {key: event[key] for key in _FIELDS}


class CheckpointModels:
    """The logged models of one run. `known`: step -> its id, path, and whether it has its metrics."""

    def __init__(self, known: dict[str, dict[str, Any]]) -> None:
        self.known = known

    def add(self, store: Store, run_id: str, event: Event) -> None:
        """Makes the model of a checkpoint, or brings the one of that step up to date."""
        fields = {key: str(value) for key, value in reference(event).items()}
        step = int(event["step"])
        model_id = store.find_or_create_model(run_id, f"step-{step:08d}", step, fields)
        store.tag_model(model_id, {STATUS_TAG: PRESENT, **fields})
        self.known[str(step)] = {"id": model_id, "path": fields["path"], "measured": False}

    def measured(self, store: Store, run_id: str, points: list[Point]) -> None:
        """Gives the run what was measured of a checkpoint, and its model, as long as that is known."""
        model = self.known.get(str(points[0].step))
        store.log_points(run_id, points, None if model is None else model["id"])

    def attach_metrics(self, store: Store, run_id: str, sent: Sent) -> None:
        """Gives each model the validation metrics that the run has at its step, the newest of several.

        They are sent as the run holds them, value and time: a store keeps equal points once, so the run's own
        history stays as it is.
        """
        for step, model in self.known.items():
            if model["measured"] or (sent.last_step or -1) < int(step):
                continue
            for key in sent.last_steps:
                if key.startswith(RANKING_METRICS):
                    points = [point for point in store.history(run_id, key) if point.step == int(step)]
                    newest = max(points, key=lambda point: point.milliseconds, default=None)
                    if newest is not None:
                        store.log_points(run_id, [newest], model["id"])
            model["measured"] = True

    def mark_deleted(self, store: Store) -> None:
        """Tells of checkpoints that retention, or a person, has removed since."""
        for step, model in list(self.known.items()):
            path = Path(model["path"])
            if model["measured"] and path.parent.is_dir() and not (path / MANIFEST_NAME).exists():
                store.tag_model(model["id"], {STATUS_TAG: DELETED})
                del self.known[step]
