"""What a tracking store can do, and its three kinds of failure. Imports no mlflow."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

RUN_KEY_TAG = "kvm_dist.run_key"


class Unavailable(Exception):
    """The store cannot be reached or answers with a fault of its own: try again later."""


class Refused(Exception):
    """The store understood and said no: trying again does not help."""


class RunGone(Exception):
    """The store does not know the run (another store, or it was deleted)."""


class Point(NamedTuple):
    """One value of one metric."""

    key: str
    value: float
    milliseconds: int
    step: int


class Dataset(NamedTuple):
    """One split of the data of a run, by reference. digest: sha256 of the whole dataset."""

    name: str
    source: str
    digest: str
    tokens: int
    context: str


class Store(Protocol):
    """What a tracking store can do. Every method may raise Unavailable, Refused or RunGone."""

    def find_run(self, experiment: str, run_key: str) -> str | None: ...
    def create_run(self, experiment: str, name: str, tags: dict[str, str], milliseconds: int) -> str: ...
    def last_steps(self, run_id: str) -> dict[str, int]: ...
    def history(self, run_id: str, key: str) -> list[Point]: ...
    def log_points(self, run_id: str, points: list[Point], model_id: str | None = None) -> None: ...
    def set_tags(self, run_id: str, tags: dict[str, str]) -> None: ...
    def log_params(self, run_id: str, params: dict[str, str]) -> None: ...
    def log_datasets(self, run_id: str, datasets: Sequence[Dataset]) -> None: ...
    def find_or_create_model(self, run_id: str, name: str, step: int, params: dict[str, str]) -> str: ...
    def tag_model(self, model_id: str, tags: dict[str, str]) -> None: ...
    def upload(self, run_id: str, path: Path, folder: str) -> None: ...
    def upload_record(self, run_id: str, record: dict[str, Any], name: str) -> None: ...
    def set_status(self, run_id: str, status: str, milliseconds: int | None) -> None: ...
