"""Faults on demand: read, aimed, and struck once."""

import signal
import time
from pathlib import Path

import pytest
import torch

from kvm_dist.exit_codes import ConfigError
from kvm_dist.faults import VARIABLE, Fault, inject_faults, parse_faults
from kvm_dist.heartbeat import Heartbeat


def test_faults_are_parted_by_commas() -> None:
    assert parse_faults("kill:1:4,nan:0:7") == (Fault("kill", 1, 4), Fault("nan", 0, 7))
    assert parse_faults("") == ()


@pytest.mark.parametrize("text", ["kil:1:4", "kill:1", "kill:x:4", "kill:1:4:5", "kill:-1:4", "kill"])
def test_what_is_no_fault_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="NAME:RANK:STEP"):
        parse_faults(text)


def beats(tmp_path: Path, model: torch.nn.Module, rank: int = 0) -> list[float]:
    """Two steps of a rank; what the model gives for 1 in each."""
    heartbeat = Heartbeat(tmp_path / "beats", rank, attempt=1)
    inject_faults(tmp_path, heartbeat, model)
    outputs = []
    for step in (1, 2):
        heartbeat.begin_step(step)
        heartbeat.beat("forward")
        outputs.append(float(model(torch.ones(1))))
        heartbeat.beat("backward")
    heartbeat.close()
    return outputs


def test_a_fault_strikes_its_rank_at_its_step_once_in_all_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "nan:1:2,spike:0:2")
    assert beats(tmp_path, torch.nn.Identity()) == [1.0, 50.0]
    assert beats(tmp_path, torch.nn.Identity()) == [1.0, 1.0]
    first, second = beats(tmp_path, torch.nn.Identity(), rank=1)
    assert first == 1.0
    assert second != second
    assert sorted(path.name for path in (tmp_path / "faults").iterdir()) == ["nan-1-2", "spike-0-2"]


def test_a_signal_comes_in_the_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "usr2:0:2")
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
    try:
        beats(tmp_path, torch.nn.Identity())
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert seen == [signal.SIGUSR2]


def test_a_slow_rank_is_slow_from_its_step_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setenv(VARIABLE, "slow:0:1")
    beats(tmp_path, torch.nn.Identity())
    assert len(slept) == 2


def test_without_the_variable_nothing_is_touched(tmp_path: Path) -> None:
    assert beats(tmp_path, torch.nn.Identity()) == [1.0, 1.0]
    assert not (tmp_path / "faults").exists()
