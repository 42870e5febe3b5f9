"""Trials on the loopback cluster wait for what Slurm needs, and say when it lost a job. No Slurm is asked."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.launch import slurm_run
from tests.launch.slurm_run import SlurmRun
from tests.support import slurm_cluster, soak


class Played:
    """A controller with one job that waits, and a clock that only sleeping moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 10.95
        self.said: list[tuple[float, str]] = []
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(slurm_run, "time", clock)
        monkeypatch.setattr(slurm_cluster, "output", self.output)
        monkeypatch.setattr(slurm_cluster, "kill_node", lambda node: self.said.append((self.now, "kill")))
        monkeypatch.setattr(slurm_cluster, "start_node", lambda node: self.said.append((self.now, "start")))

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def output(self, *command: str) -> str:
        if command[:2] == ("scontrol", "update"):
            self.said.append((self.now, command[3]))
        if command[0] == "scontrol":
            return f"Restarts={sum(word == 'kill' for _, word in self.said)}"
        return "idle" if command[0] == "sinfo" else "PENDING"


def test_a_job_is_not_started_in_the_second_it_was_ended_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(monkeypatch)
    SlurmRun(tmp_path / "run", tmp_path).start_again_now()
    ((when, what),) = played.said
    assert (what, int(when) > 10) == ("StartTime=now", True)


def test_a_node_that_was_lost_is_told_that_it_is_in_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(monkeypatch)
    SlurmRun(tmp_path / "run", tmp_path).lose_node("node2")
    assert [what for _, what in played.said] == ["kill", "start", "state=down", "state=resume"]


def test_a_soak_whose_job_slurm_gave_up_says_so_and_compares_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(*_: Any, **__: Any) -> None:
        pass

    run = SimpleNamespace(
        **dict.fromkeys(("submit", "train", "wait_for_step", "start_again_now", "cancel"), nothing),
        wait_for_end=nothing,
        reached=lambda: 3,
        restarts=lambda: 1,
        output=lambda: "Job credential revoked",
        directory=tmp_path,
    )
    for name, played in {
        "SlurmRun": lambda *_: run,
        "TinyRun": lambda *_: run,
        "strike": nothing,
        "read_attempts": lambda _: [SimpleNamespace(code=70), SimpleNamespace(code=71)],
    }.items():
        monkeypatch.setattr(soak, name, played)
    monkeypatch.setattr(slurm_cluster, "missing", lambda: "")
    with pytest.raises(SystemExit, match=r"before the run was over: ends \[70, 71\]\nJob credential revoked"):
        soak.soak(tmp_path, 20, 2, random.Random(0))
