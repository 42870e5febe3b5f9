"""The progress line on a terminal and in a log file."""

import io

from kvm_dist.progress import Progress, duration, short_count


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run(stream: io.StringIO, steps: int, start: int = 0, seconds: float = 2.0) -> str:
    clock = Clock()
    progress = Progress(steps, start, stream=stream, clock=clock)
    for step in range(start + 1, steps + 1):
        clock.now += seconds
        metrics = {"train/loss": 5.0 - step / 100, "perf/tokens_per_second": 14_230.0}
        progress.update(step, metrics | ({"validation/loss": 1.5} if step == 50 else {}))
    return stream.getvalue()


def test_a_terminal_shows_one_line_that_is_redrawn_and_closed() -> None:
    shown = run(Terminal(), 100)
    assert shown.count("\n") == 1
    assert shown.endswith("\n")
    assert shown.count("\r") == 100
    at_60 = shown.split("\r")[60]
    for part in ("60/100", "60%", "loss 4.4000", "val 1.5000", "14.2K tok/s", "1:20 min left"):
        assert part in at_60, part


def test_a_file_gets_the_first_the_last_validations_and_a_line_now_and_then() -> None:
    lines = run(io.StringIO(), 100).splitlines()
    steps = [int(line.split()[1].split("/")[0]) for line in lines]
    assert steps[0] == 1
    assert 50 in steps
    assert steps[-1] == 100
    assert 10 < len(lines) < 20
    assert not any("\r" in line or "\x1b" in line for line in lines)
    assert "left" not in lines[-1]


def test_time_left_after_a_resume_counts_the_steps_of_this_attempt_only() -> None:
    first = run(io.StringIO(), 1000, start=900, seconds=6.0).splitlines()[0]
    assert "901/1000" in first
    assert "9:54 min left" in first


def test_durations_and_counts_read_well() -> None:
    spelled = [duration(s) for s in (0, 59.4, 60, 187, 3723, 48 * 3600 + 3 * 3600, -1)]
    assert spelled == ["0 s", "59 s", "1:00 min", "3:07 min", "1:02:03 h", "2 d 03 h", "0 s"]
    assert [short_count(v) for v in (12, 950, 14_230, 1_350_000, 2e9)] == [
        "12",
        "950",
        "14.2K",
        "1.35M",
        "2G",
    ]


def test_a_terminal_that_was_closed_does_not_end_the_run() -> None:
    terminal = Terminal()
    progress = Progress(10, stream=terminal)
    progress.update(1, {"train/loss": 1.0})
    terminal.close()
    progress.update(10, {"train/loss": 1.0})
