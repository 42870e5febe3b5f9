"""A run that stands still: who is silent, and where everybody is. Imports no torch."""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvm_dist.exit_codes import HangError
from kvm_dist.heartbeat import Beat, process_state, read_beats
from kvm_dist.run_directory import RunDirectory
from kvm_dist.stacks import is_waiting, request_stacks, stack_path

HANG_NAME = "hang.json"
STACKS_SECONDS = 1.5  # for the other ranks to write where they are
_FINDING_SECONDS = 3.0  # for another rank that already looks who is silent
_POLL_SECONDS = 0.05
# "Timed out waiting" (gloo), "ran for ... before timing out" (NCCL), "wait timeout after" (their store)
_OUT_OF_TIME = ("timed out", "timing out", "wait timeout")


@dataclass(frozen=True)
class Hang:
    """Who was silent. ranks: all that are as silent as `rank`; stacks: the files that were written."""

    rank: int
    step: int
    phase: str
    cause: str
    ranks: tuple[int, ...]
    attempt: int
    stacks: tuple[str, ...]


def declare_hang(directory: RunDirectory, attempt: int, ranks: int) -> Hang:
    """Collect stacks, find the silent rank, and leave `hang.json`, or return what another rank has found."""
    folder = directory.stacks
    if (known := _claim(folder, attempt)) is not None:
        return known
    beats = read_beats(directory.heartbeats, attempt)
    stacks = request_stacks(folder, beats, STACKS_SECONDS)
    hang = find_silent(beats, stacks, ranks, attempt)
    _write(folder / HANG_NAME, json.dumps(asdict(hang), indent=2))
    return hang


def hang_behind(error: Exception, rank: int, timeout_seconds: float) -> HangError | None:
    """What to end with if `error` says that another rank was silent; None if it says something else."""
    if isinstance(error, TimeoutError):
        return HangError(str(error))
    if not any(words in str(error).lower() for words in _OUT_OF_TIME):
        return None
    return HangError(
        f"rank {rank}: another rank has not joined a collective in {timeout_seconds:g} s "
        "(parallel.timeout_seconds); see the ends of the other ranks' logs"
    )


def find_silent(beats: Sequence[Beat], stacks: Sequence[Path], ranks: int, attempt: int) -> Hang:
    """The rank that the others wait for.

    One that never beat; else of those whose process is stopped or gone, of those on this host without a
    stack, of those furthest behind, of those elsewhere without a stack, of those that wait for nobody, the
    one that has been quiet for longest. A question that is true of no rank is passed over.
    """
    paths = tuple(str(path) for path in stacks)
    missing = sorted(set(range(ranks)) - {beat.rank for beat in beats})
    if missing:
        cause = f"no sign of life of rank {missing[0]} in this attempt"
        return Hang(missing[0], 0, "start", cause, tuple(missing), attempt, paths)
    candidates = [beat for beat in beats if beat.phase != "end"] or list(beats)
    for is_suspect in _criteria(candidates, stacks):
        candidates = [beat for beat in candidates if is_suspect(beat)] or candidates
    first = min(candidates, key=lambda beat: beat.time)
    return Hang(
        first.rank,
        first.step,
        first.phase,
        _cause(first),
        tuple(beat.rank for beat in candidates),
        attempt,
        paths,
    )


def _criteria(beats: Sequence[Beat], stacks: Sequence[Path]) -> list[Callable[[Beat], bool]]:
    written = {path.name for path in stacks}
    furthest_behind = min(beat.count for beat in beats)

    def without_stack(beat: Beat) -> bool:
        return stack_path(Path(), beat.rank).name not in written

    return [
        lambda beat: process_state(beat) in ("stopped", "gone"),
        lambda beat: process_state(beat) != "" and without_stack(beat),
        lambda beat: beat.count == furthest_behind,
        without_stack,  # may only be late on another host's disk: asked after what the beats say
        lambda beat: _is_busy(beat, stacks),
    ]


def read_hang(folder: Path, attempt: int) -> Hang | None:
    """What was found in `attempt`; a Hang without a cause while somebody still looks; None if nothing."""
    try:
        record = json.loads((folder / HANG_NAME).read_text())
        hang = Hang(**{**record, "ranks": tuple(record["ranks"]), "stacks": tuple(record["stacks"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return hang if hang.attempt == attempt else None


def _cause(beat: Beat) -> str:
    state = process_state(beat)
    how = {"stopped": "is stopped (as by SIGSTOP)", "gone": "is gone"}.get(state, "has stood still")
    seconds = max(0.0, time.time() - beat.time)
    return (
        f"rank {beat.rank} (host {beat.host}, pid {beat.pid}) {how}: no sign of life for {seconds:.0f} s, "
        f"the last in step {beat.step}, phase {beat.phase}"
    )


def _is_busy(beat: Beat, stacks: Sequence[Path]) -> bool:
    for path in stacks:
        if path.name == stack_path(Path(), beat.rank).name:
            return is_waiting(path.read_text(errors="replace")) is False
    return False


def _claim(folder: Path, attempt: int) -> Hang | None:
    """None for the first rank that comes; for the others what it has found, once it has."""
    placeholder = asdict(Hang(-1, 0, "", "", (), attempt, ()))
    path = folder / HANG_NAME
    if read_hang(folder, attempt) is None:
        claim = path.with_name(f"{HANG_NAME}.{attempt}")
        try:
            os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o640))
            _write(path, json.dumps(placeholder))
            return None
        except FileExistsError:
            pass
        except OSError:
            return None  # a full disk: say it at least
    deadline = time.monotonic() + _FINDING_SECONDS
    while time.monotonic() < deadline:
        hang = read_hang(folder, attempt)
        if hang is not None and hang.cause:
            return hang
        time.sleep(_POLL_SECONDS)
    return None


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        print(f"kvm-dist: {path} was not written: {error}", file=sys.stderr)
