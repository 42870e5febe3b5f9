"""Forwards the spool of a run to a store until the run ends. Knows no mlflow: the store is an argument."""

import json
import logging
import math
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kvm_dist.metrics import METRICS_NAME, parse_metrics, parse_record
from kvm_dist.tracking.events import EVENTS_NAME, Event, Kind, Spool, latest_attempt, read_events

RUN_ID_NAME = "mlflow_run_id"
STATE_NAME = "tracking.json"
RUN_KEY_TAG = "kvm_dist.run_key"
_BATCH = 1000
_LARGEST_UPLOAD_BYTES = 25 << 20
_UPLOAD_TRIES = 3
_log = logging.getLogger(__name__)


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


class Store(Protocol):
    """What a tracking store can do. Every method may raise Unavailable, Refused or RunGone."""

    def find_run(self, experiment: str, run_key: str) -> str | None: ...
    def create_run(self, experiment: str, name: str, tags: dict[str, str], milliseconds: int) -> str: ...
    def last_steps(self, run_id: str) -> dict[str, int]: ...
    def log_points(self, run_id: str, points: list[Point]) -> None: ...
    def set_tags(self, run_id: str, tags: dict[str, str]) -> None: ...
    def log_params(self, run_id: str, params: dict[str, str]) -> None: ...
    def upload(self, run_id: str, path: Path, folder: str) -> None: ...
    def upload_record(self, run_id: str, record: dict[str, Any], name: str) -> None: ...
    def set_status(self, run_id: str, status: str, milliseconds: int | None) -> None: ...


class Forwarder:
    """Sends every event in order and every (metric, step) exactly once, over restarts and outages.

    What the store has is asked from the store; what a resumed run logs again is passed over.
    """

    def __init__(self, run_dir: Path, open_store: Callable[[str], Store], attempt: str | None) -> None:
        """`open_store` connects, given the experiment. `attempt`: whose end sets `ended`."""
        self.run_dir = run_dir
        self.attempt = attempt
        self.ended = False
        self._open_store = open_store
        self._store: Store | None = None
        self._run_id = ""
        self._state = read_state(run_dir)
        self._saved_state = ""
        self._metrics = Spool(run_dir / METRICS_NAME)
        self._events = Spool(run_dir / EVENTS_NAME, int(self._state.get("events_offset", 0)))
        self._last_steps: dict[str, int] = {}
        self._upload_failures = 0

    def pump(self) -> None:
        """Sends all there is. Raises Unavailable or RunGone; what was not sent stays in the spool."""
        try:
            self._connect()
            self._pump_events()
            self._pump_metrics()
        except RunGone:
            _log.warning(
                "the store does not know run %s (deleted, or another store): a new run is made", self._run_id
            )
            (self.run_dir / RUN_ID_NAME).unlink(missing_ok=True)
            self._forget()
            raise
        self.report_problem(None)

    def superseded(self) -> bool:
        """Whether another trainer has taken over the run directory."""
        return latest_attempt(self.run_dir) not in (None, self.attempt)

    def report_problem(self, problem: str | None) -> None:
        """Tells in `tracking.json` what keeps the spool from being sent."""
        self._state |= {"problem": problem, "last_step": max(self._last_steps.values(), default=None)}
        self._save_state()

    def _connect(self) -> None:
        if self._store is None:
            self._store = self._open_store(self._first_start()["experiment"])
        if not self._run_id:
            self._run_id = self._find_or_create_run(self._store)
            self._last_steps = self._store.last_steps(self._run_id)

    def _find_or_create_run(self, store: Store) -> str:
        path = self.run_dir / RUN_ID_NAME
        if path.exists():
            return path.read_text(encoding="ascii").strip()
        start = self._first_start()
        key = self._state.setdefault("run_key", uuid.uuid4().hex)
        self._save_state()
        run_id = store.find_run(start["experiment"], key)
        if run_id is None:
            tags = start["tags"] | {RUN_KEY_TAG: key}
            run_id = store.create_run(start["experiment"], start["name"], tags, milliseconds(start))
        partial = path.with_name(f"{RUN_ID_NAME}.partial")
        partial.write_text(run_id + "\n", encoding="ascii")
        os.replace(partial, path)
        return run_id

    def _forget(self) -> None:
        """Everything is sent again, to the run that will be made."""
        self._run_id = ""
        self._metrics.advance(0)
        self._events.advance(0)
        self._state.pop("run_key", None)
        self._state["events_offset"] = 0
        self._save_state()

    # Metrics

    def _pump_metrics(self) -> None:
        waiting: list[Point] = []
        seen = dict(self._last_steps)
        offset = self._metrics.offset
        for line, offset in self._metrics.read():
            for point in points_of(line):
                if point.step > seen.get(point.key, -1):
                    seen[point.key] = point.step
                    waiting.append(point)
            if len(waiting) >= _BATCH:
                self._send(waiting, offset)
                waiting = []
        self._send(waiting, offset)

    def _send(self, points: list[Point], offset: int) -> None:
        for start in range(0, len(points), _BATCH):
            batch = points[start : start + _BATCH]
            try:
                self._client.log_points(self._run_id, batch)
            except Refused as error:
                _log.error("the store refuses %d metrics from step %d: %s", len(batch), batch[0].step, error)
            for point in batch:
                self._last_steps[point.key] = point.step
        self._metrics.advance(offset)

    # Events

    def _pump_events(self) -> None:
        latest = latest_attempt(self.run_dir)
        for line, offset in self._events.read():
            event = parse_record(line) or {}
            is_end = event.get("kind") == Kind.END
            if is_end:
                self._pump_metrics()  # whatever was logged before the end is in the file by now
            if not is_end or event.get("attempt") == latest:
                self._handle(event)
            self._events.advance(offset)
            self._state["events_offset"] = offset
            self._save_state()

    def _handle(self, event: Event) -> None:
        try:
            match event.get("kind"):
                case Kind.START:
                    self._start(event)
                case Kind.CHECKPOINT:
                    self._checkpoint(event)
                case Kind.ARTIFACT:
                    self._artifact(Path(event["path"]), event["folder"])
                case Kind.END:
                    self._client.set_status(self._run_id, event["status"], milliseconds(event))
                    self.ended = event["attempt"] == self.attempt
        except (Refused, KeyError, TypeError) as error:
            _log.error("event %s is passed over: %s: %s", event.get("kind"), type(error).__name__, error)

    def _start(self, event: Event) -> None:
        self._client.set_status(self._run_id, "RUNNING", None)
        self._client.set_tags(self._run_id, event["tags"])
        self._client.log_params(self._run_id, event["params"])
        if (self.run_dir / "config.yaml").exists():
            self._artifact(self.run_dir / "config.yaml", "")

    def _checkpoint(self, event: Event) -> None:
        known = {key: event[key] for key in ("path", "step", "manifest_sha256", "bytes")}
        self._client.set_tags(self._run_id, {f"checkpoint.{key}": str(value) for key, value in known.items()})
        name = f"checkpoints/step-{event['step']:08d}.json"
        self._try_upload(lambda: self._client.upload_record(self._run_id, known, name), name)

    def _artifact(self, path: Path, folder: str) -> None:
        if not path.is_file() or path.stat().st_size > _LARGEST_UPLOAD_BYTES:
            _log.warning("%s is not uploaded: missing, or above %d bytes", path, _LARGEST_UPLOAD_BYTES)
            return
        self._try_upload(lambda: self._client.upload(self._run_id, path, folder), path.name)

    def _try_upload(self, upload: Callable[[], None], name: str) -> None:
        """Files may go to another place than metrics: they are given up after some tries, metrics are not."""
        try:
            upload()
        except (Unavailable, Refused) as error:
            self._upload_failures += 1
            if self._upload_failures < _UPLOAD_TRIES and not isinstance(error, Refused):
                raise
            _log.error("%s is not uploaded: %s", name, error)
        self._upload_failures = 0

    # State

    @property
    def _client(self) -> Store:
        assert self._store is not None, "sending begins after connecting"
        return self._store

    def _first_start(self) -> Event:
        for event in read_events(self.run_dir):
            if event.get("kind") == Kind.START:
                return event
        raise Refused(f"{self.run_dir / EVENTS_NAME} tells of no start: nothing to track")

    def _save_state(self) -> None:
        text = json.dumps(self._state, indent=2) + "\n"
        if text == self._saved_state:
            return
        partial = self.run_dir / f"{STATE_NAME}.partial"
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, self.run_dir / STATE_NAME)
        self._saved_state = text


def points_of(line: bytes) -> list[Point]:
    """The values of one line of `metrics.jsonl`; what is not finite is sent as NaN."""
    values = parse_metrics(line)
    if values is None:
        return []
    step, moment = int(values.pop("step")), round(values.pop("time") * 1000)
    finite = {key: value if math.isfinite(value) else math.nan for key, value in values.items()}
    return [Point(key, float(value), moment, step) for key, value in finite.items()]


def milliseconds(event: Event) -> int:
    return round(float(event["time"]) * 1000)


def read_state(run_dir: Path) -> dict[str, Any]:
    """`tracking.json`: how far the events are sent and what keeps the store from answering, if anything."""
    try:
        state = json.loads((run_dir / STATE_NAME).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}
