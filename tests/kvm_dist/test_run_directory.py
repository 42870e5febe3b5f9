"""A run directory belongs to one configuration and one live launch."""

import json
import os
import socket
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvm_dist.exit_codes import ConfigError, StorageError
from kvm_dist.load import LoadedConfig, load_config
from kvm_dist.run_directory import RunDirectory, locked_run_directory, open_run_directory
from kvm_dist.run_lock import hold_lock


def loaded(tmp_path: Path, *overrides: str) -> LoadedConfig:
    path = tmp_path / "run.yaml"
    path.write_text(f"run_root: {tmp_path}/runs\nname: one\n")
    return load_config(path, overrides)


def test_a_new_directory_is_private_and_holds_the_resolved_configuration(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        directory = open_run_directory(loaded(tmp_path, "train.steps=7"))
    finally:
        os.umask(old)
    for folder in (directory.path, directory.checkpoints, directory.logs, directory.plots):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o750
    assert load_config(directory.config_path).config == loaded(tmp_path, "train.steps=7").config
    assert directory.log_path(3) == tmp_path / "runs/one/logs/rank-00003.log"
    assert [path.name for path in directory.path.iterdir() if path.is_file()] == ["config.yaml"]


def test_names_alone_touch_nothing(tmp_path: Path) -> None:
    assert RunDirectory(tmp_path / "x").metrics_path == tmp_path / "x/metrics.jsonl"
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "override",
    [
        "seed=1",
        "model.hidden_size=384",
        "model.layers=[rwkv7]",
        "model.kvm.budget={kind: fixed}",
        "data.sequence_length=4096",
        "data.tokenizer=rwkv-world",
        "data.shuffle_tokens=5",
        "optimizer.learning_rate=3e-3",
        "schedule.warmup_steps=1",
        "train.steps=7",
        "train.batch_sequences=128",
        "parallel.precision=bfloat16",
    ],
)
def test_an_edit_that_changes_the_result_is_refused_with_a_diff(tmp_path: Path, override: str) -> None:
    directory = open_run_directory(loaded(tmp_path))
    directory.metrics_path.write_text('{"step": 1}\n')
    before = directory.config_path.read_text()
    with pytest.raises(ConfigError) as caught:
        open_run_directory(loaded(tmp_path, override))
    message = str(caught.value)
    assert f"  {override.partition('=')[0]}" in message
    assert " -> " in message
    assert f"(command line: {override})" in message
    assert "name=OTHER" in message
    assert directory.config_path.read_text() == before


def test_an_edit_after_a_start_that_failed_before_the_first_step_is_taken(tmp_path: Path) -> None:
    open_run_directory(loaded(tmp_path))
    mended = loaded(tmp_path, "data.tokenizer=rwkv-world")
    directory = open_run_directory(mended)
    assert load_config(directory.config_path).config == mended.config
    (directory.checkpoints / "step-00000001").mkdir()
    with pytest.raises(ConfigError, match=r"data\.tokenizer"):
        open_run_directory(loaded(tmp_path))


@pytest.mark.parametrize(
    "override",
    [
        "parallel.data=2",
        "parallel.sequence=2",
        "parallel.zero_stage=3",
        "train.accumulation=2",
        "train.loss_chunk=7",
        "train.log_every_steps=9",
        "checkpoint.every_steps=5",
        "tracking.enabled=false",
        "evaluation.every_steps=5",
        "device=cpu",
        "slurm.nodes=2",
        "data.workers=1",
        "model.kvm.backend=torch",
        "model.gated_deltanet.backend=torch",
        "model.gla.backend=fla",
    ],
)
def test_an_edit_of_the_layout_is_taken_and_written(tmp_path: Path, override: str) -> None:
    open_run_directory(loaded(tmp_path))
    changed = loaded(tmp_path, override)
    directory = open_run_directory(changed)
    assert load_config(directory.config_path).config == changed.config


def test_a_run_root_that_cannot_be_written_is_a_storage_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file is in the way")
    with pytest.raises(StorageError, match=r"runs.*run_root=PATH"):
        open_run_directory(loaded(tmp_path))
    with pytest.raises(StorageError, match="cannot be written"), locked_run_directory(loaded(tmp_path)):
        pass


def test_a_run_directory_under_proc_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be written"):
        open_run_directory(loaded(tmp_path, "run_root=/proc/runs"))


def test_an_error_of_the_run_itself_is_passed_on_unchanged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), locked_run_directory(loaded(tmp_path)) as directory:
        raise FileNotFoundError(directory.path)
    assert not directory.lock_path.exists()


def test_a_second_launch_is_refused_and_named(tmp_path: Path) -> None:
    with locked_run_directory(loaded(tmp_path)) as directory:
        with pytest.raises(ConfigError) as caught, locked_run_directory(loaded(tmp_path)):
            pass
        assert f"pid {os.getpid()} on this host ({socket.gethostname()})" in str(caught.value)
        assert directory.lock_path.exists()
    assert not directory.lock_path.exists()
    with locked_run_directory(loaded(tmp_path)):
        pass


def holder(pid: int, host: str = socket.gethostname(), process_start: int = 1) -> str:
    return json.dumps({"host": host, "pid": pid, "process_start": process_start, "since": "then"})


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text(holder(dead_pid()))
    with hold_lock(lock):
        assert json.loads(lock.read_text())["pid"] == os.getpid()
    assert not lock.exists()


def test_a_reused_pid_is_not_taken_for_the_holder(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text(holder(os.getpid(), process_start=1))
    with hold_lock(lock):
        pass


def test_a_lock_from_another_host_stands_and_says_how_to_remove_it(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text(holder(dead_pid(), host="elsewhere"))
    with pytest.raises(ConfigError, match=r"on host elsewhere.*delete"), hold_lock(lock):
        pass
    assert lock.exists()


def test_a_lock_file_in_the_making_is_respected_until_it_is_old(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    with pytest.raises(ConfigError, match="just starting"), hold_lock(lock):
        pass
    os.utime(lock, (1, 1))
    with hold_lock(lock):
        pass


def test_of_many_launches_that_find_a_stale_lock_one_wins(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    program = (
        "import sys, time; from pathlib import Path; from kvm_dist.run_lock import hold_lock\n"
        "with hold_lock(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    lock.write_text(holder(dead_pid()))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(lock)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for _ in range(4)
    ]

    def first_line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    with ThreadPoolExecutor(4) as pool:
        lines = list(pool.map(first_line, processes))
    for process in processes:
        process.communicate()
    assert sorted(lines) == ["", "", "", "held"]
    assert not lock.exists()
