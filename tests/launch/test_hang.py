"""A run that stands still ends with 71, with everybody's stacks, and with the name of the silent rank."""

import json
import os
import signal
from pathlib import Path
from typing import Any

from tests.launch.silent_ranks import start, wait_until


def postmortem(folder: Path) -> Any:
    return json.loads((folder / "runs/r/postmortem.json").read_text())


def stacks(folder: Path, rank: int) -> str:
    return (folder / f"runs/r/stacks/rank-{rank:05d}.txt").read_text()


def test_a_stopped_rank_is_named_with_its_step_and_phase(tmp_path: Path) -> None:
    process = start(tmp_path, 2, "wait", "wait", "wait")
    wait_until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(3)))
    os.kill(int((tmp_path / "ready-1").read_text()), signal.SIGSTOP)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 71, err
    found = postmortem(tmp_path)
    assert (found["rank"], found["step"], found["phase"], found["meaning"]) == (1, 2, "forward", "hang")
    assert "is stopped (as by SIGSTOP)" in found["cause"]
    assert "is stopped (as by SIGSTOP)" in err
    assert found["noticed_by"] != 1
    assert [Path(path).name for path in found["stacks"]] == ["rank-00000.txt", "rank-00002.txt"]
    assert "in main" in stacks(tmp_path, 2)
    assert [beat["rank"] for beat in found["heartbeats"]] == [0, 1, 2]


def test_a_rank_that_loops_in_its_data_is_named(tmp_path: Path) -> None:
    process = start(tmp_path, 2, "wait", "loop")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 71, err
    found = postmortem(tmp_path)
    assert (found["rank"], found["step"], found["phase"]) == (1, 2, "data")
    assert "in loop_for_ever" in stacks(tmp_path, 1)
    assert len(found["stacks"]) == 2


def test_a_rank_that_holds_the_interpreter_is_noticed_by_the_launcher(tmp_path: Path) -> None:
    process = start(tmp_path, 1, "hold")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 71, err
    found = postmortem(tmp_path)
    assert (found["rank"], found["step"], found["phase"]) == (0, 2, "data")
    assert "in main" in stacks(tmp_path, 0)


def test_a_run_that_goes_on_is_left_alone(tmp_path: Path) -> None:
    process = start(tmp_path, 60, "end", "end")
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert not (tmp_path / "runs/r/postmortem.json").exists()
