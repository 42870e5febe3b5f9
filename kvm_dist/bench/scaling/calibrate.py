"""From the clocks of ranks that ran alone to what each operation costs and what each rank does. No torch.

What a rank computes between two messages is one operation, named by the messages around it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from kvm_dist.bench.scaling.program import Program, Receive, Send, Step, Work, collective

PROJECTIONS = "projections, feed-forward"
LOSS = "last feed-forward, loss"


@dataclass(frozen=True)
class MeasuredLink:
    """Between two processes of this machine: alpha + bytes / beta for the sender's call and for the way."""

    sender_alpha: float
    sender_beta: float  # bytes a second
    alpha: float
    beta: float

    @classmethod
    def fit(cls, rows: Sequence[dict[str, float]]) -> "MeasuredLink":
        """Through the smallest and the largest message; what the sender's call takes is not the wire's."""
        small, large = rows[0], rows[-1]
        size = large["bytes"] - small["bytes"]
        sender, way = "sender_seconds", "one_way_seconds"
        per_sender_byte = max(large[sender] - small[sender], 0.0) / size
        per_byte = max(large[way] - small[way], 0.0) / size
        sender_alpha = max(small[sender] - small["bytes"] * per_sender_byte, 0.0)
        return cls(
            sender_alpha=sender_alpha,
            sender_beta=_rate(per_sender_byte),
            alpha=max(small[way] - small["bytes"] * per_byte - sender_alpha, 0.0),
            beta=_rate(per_byte - per_sender_byte),
        )

    def sender_seconds(self, source: int, to: int, size: int) -> float:
        return self.sender_alpha + size / self.sender_beta

    def wire_seconds(self, source: int, to: int, size: int) -> float:
        return size / self.beta

    def latency_seconds(self, source: int, to: int) -> float:
        return self.alpha

    def receiver_seconds(self, source: int, to: int, size: int) -> float:
        return 0.0  # part of the measured way


def _rate(seconds_per_byte: float) -> float:
    return 1 / seconds_per_byte if seconds_per_byte > 0 else float("inf")


def measured_programs(processes: Sequence[dict[str, Any]]) -> list[Program]:
    """What each rank does in a step, from the results of the `alone` processes; medians over their rounds."""
    rounds = [one for process in processes for one in process["rounds"]]
    ranks = range(len(rounds[0]["ranks"]))
    tail = median(one["tail_seconds"] for one in rounds)
    return [
        [*_steps([one["ranks"][rank] for one in rounds]), *collective("reduction and update", tail)]
        for rank in ranks
    ]


def _steps(rounds: Sequence[dict[str, Any]]) -> Iterator[Step]:
    """One rank's step; rounds: the same rank's clocks in every round."""
    events = rounds[0]["events"]
    gaps = [list(_gaps(one)) for one in rounds]
    for index, event in enumerate([*events, None]):
        seconds = median(own[index] for own in gaps)
        before = events[index - 1] if index else None
        name, phase = operation_between(before, event)
        layer = _layer_between(before, event)
        yield Work(name, seconds, phase, layer)
        if event is not None:
            yield message(event)


def message(event: dict[str, Any]) -> Send | Receive:
    if event["operation"] == "send":
        return Send(event["to"], event["name"], event["bytes"])
    return Receive(event["source"], event["name"])


def _gaps(rank: dict[str, Any]) -> Iterator[float]:
    """Seconds computed before each message, and after the last; the pause between forward and backward,
    when other ranks ran, is left out."""
    (begun, turned), (resumed, ended) = rank["forward"], rank["backward"]
    at, pause = begun, resumed - turned
    for event in rank["events"]:
        backward = event["phase"] == "backward"
        yield max(event["start"] - at - (pause if backward else 0.0), 0.0)
        at, pause = event["stop"], 0.0 if backward else pause
    yield max(ended - at - pause, 0.0)


def operation_between(before: dict[str, Any] | None, after: dict[str, Any] | None) -> tuple[str, str]:
    """Name and phase of what is computed between two messages (None: the start or the end of the step)."""
    if before is not None and before["phase"] == "backward":
        return _backward_operation(_part(before), _part(after)), "backward"
    if after is None or after["phase"] == "backward":
        return LOSS, "backward"
    routes_as_it_reads = before is not None and before["operation"] == "receive"
    return _forward_operation(_part(before), _part(after), after["operation"], routes_as_it_reads), "forward"


def _forward_operation(before: str, after: str, operation: str, routes_as_it_reads: bool) -> str:
    if after.startswith("keys") and operation == "send":
        return "route"
    if after.startswith("values") and operation == "send":
        return "values"
    if before.startswith(("keys", "values")) and after == "feed_forward.shift":
        return "route, attend" if routes_as_it_reads else "attend"
    if after == "state":
        return "recurrence: chunks" if before != "state" else "recurrence: carry"
    if before == "state":
        return "recurrence: read"
    return PROJECTIONS


def _backward_operation(before: str, after: str) -> str:
    if after.startswith(("window.gradient", "slots.gradient")) and not before.startswith("slots"):
        return "attend"
    if before.startswith("slots.gradient") and after.startswith("slots.gradient"):
        return "sum slots"
    if before.startswith(("slots.gradient", "share")) and after.startswith("share"):
        return "share out"
    if before.startswith("window.gradient"):
        return "attend"
    if "state" in (before.split()[0], after.split()[0]):
        return "recurrence"
    return PROJECTIONS


def _part(event: dict[str, Any] | None) -> str:
    """`3.kvm.keys` -> `keys`; shifts of the feed-forward part keep their owner's name."""
    if event is None:
        return "end"
    pieces = event["name"].split(".", 2)
    part = pieces[-1]
    return f"feed_forward.{part}" if "feed_forward" in pieces else part


def _layer_between(before: dict[str, Any] | None, after: dict[str, Any] | None) -> int | None:
    for event in (after, before):
        if event is not None:
            return event["layer"]
    return None


def operation_seconds(program: Program) -> dict[str, float]:
    """`phase: operation` -> seconds, dearest first."""
    total: dict[str, float] = {}
    for step in program:
        if isinstance(step, Work):
            key = f"{step.phase}: {step.name}"
            total[key] = total.get(key, 0.0) + step.seconds
    return dict(sorted(total.items(), key=lambda pair: -pair[1]))
