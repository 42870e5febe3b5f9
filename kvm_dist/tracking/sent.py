"""What of a run's metrics its store has, asked from the store itself. Imports no mlflow."""

from collections.abc import Sequence

from kvm_dist.tracking.protocol import Point, Store

ROLLBACKS = "fault/rollbacks"  # how often the run had gone back when a line was logged
SYSTEM_PREFIX = "system/"  # samples of a machine are numbered by themselves: no rollback takes them again


class Sent:
    """The last step that was sent of every metric, of the way that the run is on.

    A resumed run logs the same values again, which are passed over. One that went back takes its steps with
    other batches: from there on the new values are sent, beside the ones before. Of two values of one step a
    store takes the later one for the metric's, as the time of a line says.
    """

    def __init__(self, last_steps: dict[str, int] | None = None, rollbacks: int = 0) -> None:
        self.last_steps = last_steps or {}
        self.rollbacks = rollbacks

    def copy(self) -> "Sent":
        return Sent(dict(self.last_steps), self.rollbacks)

    @property
    def last_step(self) -> int | None:
        """Of the run, None if nothing was sent."""
        return max((step for key, step in self.last_steps.items() if _is_of_the_run(key)), default=None)

    def fresh(self, line: Sequence[Point]) -> list[Point]:
        """Those of one logged line that were not sent; they count as sent from here on."""
        rollbacks = max((int(point.value) for point in line if point.key == ROLLBACKS), default=0)
        if rollbacks > self.rollbacks:
            self.rollbacks = rollbacks
            self._go_back(line[0].step - 1)
        new = [point for point in line if point.step > self.last_steps.get(point.key, -1)]
        self.last_steps.update({point.key: point.step for point in new})
        return new

    def _go_back(self, step: int) -> None:
        for key, last in self.last_steps.items():
            if _is_of_the_run(key):
                self.last_steps[key] = min(last, step)


def asked(store: Store, run_id: str) -> Sent:
    """By the store's own word. After a rollback the highest step may be one of the way that was left."""
    last_steps = store.last_steps(run_id)
    marks = store.history(run_id, ROLLBACKS) if ROLLBACKS in last_steps else []
    rollbacks = max((int(mark.value) for mark in marks), default=0)
    if rollbacks == 0:
        return Sent(last_steps)
    way = [mark for mark in marks if int(mark.value) == rollbacks]
    begun, first = min(mark.milliseconds for mark in way), min(mark.step for mark in way)
    for key in filter(_is_of_the_run, last_steps):
        since = (point.step for point in store.history(run_id, key) if point.milliseconds >= begun)
        last_steps[key] = max(since, default=first - 1)
    return Sent(last_steps, rollbacks)


def _is_of_the_run(key: str) -> bool:
    return not key.startswith(SYSTEM_PREFIX)
