"""A tracking store in memory, which fails when told to."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvm_dist.tracking.protocol import Dataset, Point, RunGone, Unavailable


class MemoryStore:
    """Keeps what it gets. `fault` is called before every write and may raise."""

    def __init__(self) -> None:
        self.runs: dict[str, list[Point]] = {}
        self.keys: dict[str, str] = {}
        self.status: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.datasets: list[Dataset] = []
        self.models: dict[str, dict[str, str]] = {}
        self.model_points: dict[str, set[Point]] = {}
        self.params: dict[str, str] = {}
        self.uploads: list[str] = []
        self.batches = 0
        self.fault: Callable[[str], None] = lambda _: None
        self.committed_but_unanswered = False

    def find_run(self, experiment: str, run_key: str) -> str | None:
        return self.keys.get(run_key)

    def create_run(self, experiment: str, name: str, tags: dict[str, str], milliseconds: int) -> str:
        self.fault("create")
        run_id = f"run-{len(self.runs)}"
        self.runs[run_id] = []
        self.keys[tags["kvm_dist.run_key"]] = run_id
        return run_id

    def last_steps(self, run_id: str) -> dict[str, int]:
        if run_id not in self.runs:
            raise RunGone(run_id)
        return {point.key: point.step for point in sorted(self.runs[run_id], key=lambda point: point.step)}

    def history(self, run_id: str, key: str) -> list[Point]:
        return [point for point in self.runs[run_id] if point.key == key]

    def log_points(self, run_id: str, points: list[Point], model_id: str | None = None) -> None:
        self.fault("points")
        if model_id is not None:
            self.model_points.setdefault(model_id, set()).update(points)
        self.batches += 1
        known = set(self.runs[run_id])
        self.runs[run_id] += [point for point in points if point not in known]
        if self.committed_but_unanswered:
            self.committed_but_unanswered = False
            raise Unavailable("the answer was lost")

    def set_tags(self, run_id: str, tags: dict[str, str]) -> None:
        self.tags |= tags

    def log_params(self, run_id: str, params: dict[str, str]) -> None:
        self.params = params | self.params

    def log_datasets(self, run_id: str, datasets: Sequence[Dataset]) -> None:
        self.datasets = list(datasets)

    def find_or_create_model(self, run_id: str, name: str, step: int, params: dict[str, str]) -> str:
        self.fault("model")
        self.models.setdefault(name, dict(params))
        return name

    def tag_model(self, model_id: str, tags: dict[str, str]) -> None:
        self.fault("model")
        self.models[model_id] |= tags

    def upload(self, run_id: str, path: Path, folder: str) -> None:
        self.fault("upload")
        self.uploads.append(f"{folder}/{path.name}")

    def upload_record(self, run_id: str, record: dict[str, Any], name: str) -> None:
        self.fault("upload")
        self.uploads.append(name)

    def set_status(self, run_id: str, status: str, milliseconds: int | None) -> None:
        self.fault("status")
        self.status[run_id] = status
