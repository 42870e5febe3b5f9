"""Forwards the spool of a run to a store until the run ends. Knows no mlflow: the store is an argument."""

import json
import logging
import math
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvm_dist.metrics import METRICS_NAME, parse_metrics, parse_record
from kvm_dist.system_metrics import SYSTEM_FOLDER
from kvm_dist.tracking.events import EVENTS_NAME, Event, Kind, Spool, has_ended, latest_attempt, read_events
from kvm_dist.tracking.models import CheckpointModels, reference
from kvm_dist.tracking.protocol import RUN_KEY_TAG, Dataset, Point, Refused, RunGone, Store, Unavailable
from kvm_dist.tracking.sent import Sent, asked
from kvm_dist.tracking.sweep import parent_run

RUN_ID_NAME = "mlflow_run_id"
STATE_NAME = "tracking.json"
_BATCH = 1000
_LARGEST_UPLOAD_BYTES = 25 << 20
_TRIES = 3
_log = logging.getLogger(__name__)


class Forwarder:
    """Sends every event in order and every (metric, step) exactly once, over restarts and outages.

    What the store has is asked from the store; what a resumed run logs again is passed over. Only a run that
    went back, and took steps again with other batches, sends their new values, too, once.
    """

    def __init__(self, run_dir: Path, open_store: Callable[[str], Store], attempt: str | None) -> None:
        """`open_store` connects, given the experiment.

        attempt: `ended` tells that it has ended and everything was sent.
        """
        self.run_dir = run_dir
        self.attempt = attempt
        self.ended = False
        self._open_store = open_store
        self._store: Store | None = None
        self._run_id = ""
        self._state = read_state(run_dir)
        self._saved_state = ""
        self._metrics = Spool(run_dir / METRICS_NAME)
        self._system: dict[str, Spool] = {}
        self._models = CheckpointModels(self._state.setdefault("models", {}))
        self._events = Spool(run_dir / EVENTS_NAME, int(self._state.get("events_offset", 0)))
        self._sent = Sent()
        self._failures: dict[str, int] = {}

    def pump(self) -> None:
        """Sends all there is. Raises Unavailable or RunGone; what was not sent stays in the spool."""
        ended = has_ended(self.run_dir, self.attempt)
        try:
            self._connect()
            self._pump_events()
            self._pump_all_metrics()
        except RunGone:
            _log.warning(
                "the store does not know run %s (deleted, or another store): a new run is made", self._run_id
            )
            (self.run_dir / RUN_ID_NAME).unlink(missing_ok=True)
            self._forget()
            raise
        self.report_problem(None)
        self.ended = ended

    def superseded(self) -> bool:
        """Whether another trainer has taken over the run directory."""
        return latest_attempt(self.run_dir) not in (None, self.attempt)

    def report_problem(self, problem: str | None) -> None:
        """Tells in `tracking.json` what keeps the spool from being sent."""
        self._state |= {"problem": problem, "last_step": self._sent.last_step}
        self._save_state()

    def _connect(self) -> None:
        if self._store is None:
            self._store = self._open_store(self._first_start()["experiment"])
        if not self._run_id:
            self._run_id = self._find_or_create_run(self._store)
            self._sent = asked(self._store, self._run_id)

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
        for spool in (self._metrics, self._events, *self._system.values()):
            spool.advance(0)
        self._models.known.clear()
        self._state.pop("run_key", None)
        self._state["events_offset"] = 0
        self._save_state()

    # Metrics

    def _pump_all_metrics(self) -> None:
        """The trainer's metrics, those of the nodes, and what checkpoints are to be judged by."""
        self._pump_metrics(self._metrics)
        for path in sorted((self.run_dir / SYSTEM_FOLDER).glob("*.jsonl")):
            self._pump_metrics(self._system.setdefault(path.name, Spool(path)))
        self._try(lambda: self._tend_models(self._client), "what is known of checkpoints")
        self._save_state()

    def _tend_models(self, store: Store) -> None:
        self._models.attach_metrics(store, self._run_id, self._sent)
        self._models.mark_deleted(store)

    def _pump_metrics(self, spool: Spool) -> None:
        """In batches of whole lines."""
        waiting: list[Point] = []
        sent, offset = self._sent.copy(), spool.offset
        for line, behind in spool.read():
            points = points_of(line)
            if len(waiting) + len(points) > _BATCH:
                self._send(waiting, sent)
                spool.advance(offset)
                waiting = []
            waiting += sent.fresh(points)
            offset = behind
        self._send(waiting, sent)
        spool.advance(offset)

    def _send(self, points: list[Point], sent: Sent) -> None:
        """`sent`: what the store has then."""
        for start in range(0, len(points), _BATCH):
            batch = points[start : start + _BATCH]
            try:
                self._client.log_points(self._run_id, batch)
            except Refused as error:
                _log.error("the store refuses %d metrics from step %d: %s", len(batch), batch[0].step, error)
        self._sent = sent.copy()

    # Events

    def _pump_events(self) -> None:
        latest = latest_attempt(self.run_dir)
        for line, offset in self._events.read():
            event = parse_record(line) or {}
            is_end = event.get("kind") == Kind.END
            if is_end:
                self._pump_all_metrics()  # whatever was logged before the end is in the files by now
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
                case Kind.EVALUATION:
                    self._models.measured(self._client, self._run_id, measured_points(event))
                case Kind.END:
                    self._client.set_status(self._run_id, event["status"], milliseconds(event))
        except (Refused, KeyError, TypeError) as error:
            _log.error("event %s is passed over: %s: %s", event.get("kind"), type(error).__name__, error)

    def _start(self, event: Event) -> None:
        self._client.set_status(self._run_id, "RUNNING", None)
        self._client.set_tags(self._run_id, event["tags"])
        self._client.log_params(self._run_id, event["params"])
        self._try(lambda: self._log_datasets(event), "the dataset")
        self._try(self._put_below_sweep, "the parent run of the sweep")
        if (self.run_dir / "config.yaml").exists():
            self._artifact(self.run_dir / "config.yaml", "")

    def _log_datasets(self, event: Event) -> None:
        self._client.log_datasets(self._run_id, [Dataset(**fields) for fields in event.get("datasets", [])])

    def _put_below_sweep(self) -> None:
        self._client.set_tags(self._run_id, parent_run(self._client, self.run_dir))

    def _checkpoint(self, event: Event) -> None:
        known = reference(event)
        self._client.set_tags(self._run_id, {f"checkpoint.{key}": str(value) for key, value in known.items()})
        self._try(lambda: self._models.add(self._client, self._run_id, event), "a checkpoint's model")
        name = f"checkpoints/step-{event['step']:08d}.json"
        self._try(lambda: self._client.upload_record(self._run_id, known, name), name)

    def _artifact(self, path: Path, folder: str) -> None:
        if not path.is_file() or path.stat().st_size > _LARGEST_UPLOAD_BYTES:
            _log.warning("%s is not uploaded: missing, or above %d bytes", path, _LARGEST_UPLOAD_BYTES)
            return
        self._try(lambda: self._client.upload(self._run_id, path, folder), path.name)

    def _try(self, send: Callable[[], None], name: str) -> None:
        """What not every store takes, and files, which may go elsewhere, are given up after some tries.

        Metrics never are.
        """
        try:
            send()
        except (Unavailable, Refused) as error:
            self._failures[name] = self._failures.get(name, 0) + 1
            if self._failures[name] < _TRIES and not isinstance(error, Refused):
                raise
            _log.error("the store does not get %s: %s", name, error)
        self._failures.pop(name, None)

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


def measured_points(event: Event) -> list[Point]:
    """The values of an evaluation, at the step of its checkpoint."""
    step, moment = int(event["step"]), milliseconds(event)
    return [Point(key, float(value), moment, step) for key, value in event["metrics"].items()]


def milliseconds(event: Event) -> int:
    return round(float(event["time"]) * 1000)


def read_state(run_dir: Path) -> dict[str, Any]:
    """`tracking.json`: how far the events are sent and what keeps the store from answering, if anything."""
    try:
        state = json.loads((run_dir / STATE_NAME).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}
