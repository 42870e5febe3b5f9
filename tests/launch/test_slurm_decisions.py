"""What a job decides from what it sees: no Slurm is asked, its commands are played."""

import json
import os
import socket
import stat
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from kvm_dist.config import DataConfig, RunConfig
from kvm_dist.exit_codes import ConfigError, CrashError
from kvm_dist.load import LoadedConfig
from kvm_dist.metrics import append_metrics
from kvm_dist.run_lock import hold_lock, read_holder
from kvm_dist.slurm_config import ContainerConfig, SlurmConfig
from kvm_dist.slurm_queue import job_is_alive, reached_its_limit
from launch.joined import train_joined
from launch.slurm_job import _ask_to_requeue, free_port, reason_to_stay
from launch.slurm_lead import lead_problem
from launch.slurm_rank import own_local_folder
from launch.slurm_step import Step, step_command, write_end
from launch.submit_container import mounts_problem
from parallel.placement import Placement, devices_counted_once


def play(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str) -> None:
    """A program called `name` that runs `script` instead."""
    program = folder / "bin" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("code", "restarts", "stopped", "word"),
    [
        (75, 0, False, ""),
        (70, 1, False, ""),
        (71, 0, False, ""),
        (0, 0, False, "done"),
        (75, 0, True, "asked to stop"),
        (75, 2, False, "slurm.requeues=2"),
        (64, 0, False, "config"),
        (65, 0, False, "data"),
        (74, 0, False, "storage"),
        (76, 0, False, "not_finite"),
        (93, 0, False, "no_progress"),
    ],
)
def test_which_ends_are_worth_another_start(code: int, restarts: int, stopped: bool, word: str) -> None:
    reason = reason_to_stay(code, restarts, 2, stopped)
    assert (word in reason) if word else reason == ""


def test_a_lead_that_is_shorter_than_the_measured_save_is_pointed_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert lead_problem(path, 60) is None
    append_metrics(path, 1, {"perf/step_seconds": 10.0})
    assert lead_problem(path, 60) is None  # no save yet
    append_metrics(path, 2, {"perf/step_seconds": 10.0, "checkpoint/save_seconds": 90.0})
    problem = lead_problem(path, 60)
    assert problem is not None
    assert "slurm.signal_seconds=201" in problem
    assert lead_problem(path, 201) is None


STEP = [
    pytest.param({0: 0, 1: 0}, "exit 0", 0, None, id="done"),
    pytest.param({0: 75, 1: 75}, "exit 0", 75, None, id="saved"),
    pytest.param({1: 65}, "exit 137", 65, (1, "ended with exit code 65"), id="a rank that knows why"),
    pytest.param({0: 70, 1: 76}, "exit 76", 76, (1, "ended with exit code 76"), id="the code that says more"),
    pytest.param(
        {0: 70},
        "echo 'srun: error: node2: task 1: Killed' >&2; exit 137",
        70,
        (1, "on node2: Killed"),
        id="a mourner",
    ),
    pytest.param(
        {},
        "echo 'srun: error: node[1-2]: tasks 1-2: Killed' >&2; exit 137",
        70,
        (1, "on node[1-2]: Killed"),
        id="killed",
    ),
    pytest.param(
        {1: 70, 0: 70},
        "echo 'srun: error: node1: task 0: Exited with exit code 70' >&2; exit 137",
        70,
        (1, "ended with exit code 70"),
        id="one that failed before another was killed",
    ),
    pytest.param(
        {0: 75},
        "echo 'srun: error: node2: task 1: Killed' >&2; exit 137",
        70,
        (1, "on node2: Killed"),
        id="stopped because another was killed",
    ),
    pytest.param(
        {1: 70},
        "echo 'srun: error: node1: task 0: Exited with exit code 71' >&2; exit 137",
        71,
        (0, "ended with exit code 71"),
        id="a watchdog that only srun tells of",
    ),
    pytest.param({1: 70, 0: 75}, "exit 70", 70, (1, "exit code 70"), id="stopped because another failed"),
    pytest.param(
        {1: 75},
        "echo 'srun: error: node2: task 1: Exited with exit code 75' >&2; exit 137",
        75,
        None,
        id="stopped before training",
    ),
    pytest.param(
        {}, "echo 'srun: error: node2: task 1: Terminated' >&2; exit 143", 75, None, id="stopped at once"
    ),
    pytest.param({}, "exit 1", 70, (0, "did not start"), id="not started"),
    pytest.param(
        {},
        "echo 'srun: error: Unable to create step for job 7: Requested nodes are busy' >&2; exit 1",
        70,
        (0, "did not start; Unable to create step for job 7: Requested nodes are busy"),
        id="nodes that an earlier step keeps",
    ),
    pytest.param({0: 0, 1: 0}, "exit 134", 0, None, id="died of leaving, all done"),
    pytest.param({0: 0}, "exit 134", 70, (0, "did not start"), id="one rank done"),
]


@pytest.mark.parametrize(("ends", "script", "code", "blamed"), STEP)
def test_one_code_speaks_for_all_ranks(
    ends: dict[int, int], script: str, code: int, blamed: tuple[int, str] | None, tmp_path: Path
) -> None:
    for rank, end in ends.items():
        write_end(tmp_path, rank, end)
    step = Step(["sh", "-c", script], os.environ, tmp_path, ranks=2)
    assert step.exit_code() == code
    if blamed is not None:
        rank, how = step.first_failure(code)
        assert rank == blamed[0]
        assert blamed[1] in how


def test_ranks_in_a_container_run_the_interpreter_of_its_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/run/code")

    def words(container: ContainerConfig | None) -> list[str]:
        slurm = SlurmConfig(container=container, cpus_per_task=4, srun_args=["--cpu-bind=cores"])
        return step_command(RunConfig(slurm=slurm), 1, tmp_path / "c.yaml", tmp_path / "ends")

    plain = words(None)
    assert plain[0] == "srun"
    assert {"--kill-on-bad-exit=1", "--wait=0", "--cpus-per-task=4", "--cpu-bind=cores"} <= set(plain)
    assert "--immediate=600" in plain  # else srun waits for ever for nodes that an earlier step keeps
    rank = plain[plain.index(sys.executable) + 1 :]
    assert rank[-2:] == [str(tmp_path / "c.yaml"), str(tmp_path / "ends")]
    pyxis = words(ContainerConfig(image="a b;c", mounts=["/d:/d", "/e:/f"], python="py"))
    assert {"--container-image=a b;c", "--container-mounts=/d:/d,/e:/f"} <= set(pyxis)
    assert pyxis[pyxis.index("env") :] == ["env", "PYTHONPATH=/run/code", "py", *rank]
    apptainer = words(
        ContainerConfig(runtime="apptainer", image="i.sif", mounts=["/d:/d"], options=["--rocm"], python="py")
    )
    assert apptainer[apptainer.index("apptainer") :] == [
        *["apptainer", "exec", "--bind", "/d:/d", "--pwd", os.getcwd(), "--rocm", "i.sif"],
        *["env", "PYTHONPATH=/run/code", "py"],
        *rank,
    ]


APPTAINER = """
test "$1" = exec && shift
while true; do case "$1" in
    --bind) echo "shows $2"; shift 2 ;;
    --pwd) cd "$2"; shift 2 ;;
    --*) echo "with $1"; shift ;;
    *) break ;;
esac; done
echo "image $1"; shift
PYTHONPATH=/of/the/image exec "$@"
"""


def test_what_apptainer_is_told_starts_the_submitted_code_in_the_right_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in reads its command line as apptainer does; its image sets a path of its own."""
    play(tmp_path, monkeypatch, "apptainer", APPTAINER)
    play(tmp_path, monkeypatch, "py of image", 'echo "code $PYTHONPATH"; pwd; echo "$@"')
    monkeypatch.setenv("PYTHONPATH", "/run/my code")
    monkeypatch.chdir(tmp_path)
    container = ContainerConfig(
        runtime="apptainer",
        image="some image.sif",
        mounts=["/my data:/my data:ro", "/scratch"],
        options=["--rocm"],
        python=str(tmp_path / "bin" / "py of image"),
    )
    config = RunConfig(slurm=SlurmConfig(container=container))
    command = step_command(config, 1, tmp_path / "c d.yaml", tmp_path / "ends")
    said = subprocess.run(
        command[command.index("apptainer") :], cwd="/", capture_output=True, text=True, check=True
    ).stdout
    assert said.splitlines() == [
        *["shows /my data:/my data:ro", "shows /scratch", "with --rocm", "image some image.sif"],
        *["code /run/my code", str(tmp_path)],
        f"-P -u -m launch.slurm_rank {tmp_path}/c d.yaml {tmp_path}/ends",
    ]


def test_folders_that_a_container_does_not_show_are_pointed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")

    def problem(**given: object) -> str | None:
        container = ContainerConfig.model_validate({"image": "i", **given})
        data = DataConfig(path=Path("/data/corpus"))
        return mounts_problem(
            RunConfig(run_root=Path("/scratch/runs"), data=data, slurm=SlurmConfig(container=container))
        )

    nothing = problem()
    assert nothing is not None
    assert "/scratch/runs/run:/scratch/runs/run, /data/corpus:/data/corpus, /:/" in nothing
    assert problem(mounts=["/:/"]) is None
    elsewhere = problem(mounts=["/scratch:/scratch", "/data:/corpora", "/:/host"])
    assert elsewhere is not None
    assert elsewhere.endswith("/data/corpus:/data/corpus, /:/")
    monkeypatch.chdir("/usr")
    assert problem(runtime="apptainer", mounts=["/scratch", "/data:/data:ro"]) is None
    assert mounts_problem(RunConfig()) is None


def test_a_node_without_scontrol_says_so_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "No such file" in _ask_to_requeue("7")
    play(tmp_path, monkeypatch, "scontrol", "echo 'Requeue is disabled' >&2; exit 1")
    assert _ask_to_requeue("7") == "Requeue is disabled"
    play(tmp_path, monkeypatch, "scontrol", "exit 3")
    assert _ask_to_requeue("7") == "scontrol ended with 3"
    play(tmp_path, monkeypatch, "scontrol", f'echo "$@" > {tmp_path}/asked')
    assert _ask_to_requeue("7") == ""
    assert (tmp_path / "asked").read_text() == "requeue 7\n"


def test_a_port_is_free_and_below_those_of_outgoing_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1024 < free_port() < 32768
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr("launch.slurm_job.PORTS", range(port, port + 1))
        with pytest.raises(CrashError, match="set MASTER_PORT"):
            free_port()


def test_ranks_that_srun_starts_themselves_count_gpus_once_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "4,5")
    monkeypatch.setattr("launch.joined.locked_run_directory", lambda loaded: nullcontext())
    monkeypatch.setattr("launch.joined.write_log", lambda directory, rank: sys.exit(3))
    with pytest.raises(SystemExit):
        train_joined(LoadedConfig(RunConfig(), {}), Placement())
    assert "HIP_VISIBLE_DEVICES" not in os.environ
    assert os.environ["ROCR_VISIBLE_DEVICES"] == "4,5"


def test_gpus_hidden_from_rocm_are_not_counted_again() -> None:
    assert devices_counted_once({"CUDA_VISIBLE_DEVICES": "2,3"}) == ()
    twice = {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "2,3"}
    assert devices_counted_once(twice) == ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    assert devices_counted_once({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}) == ()


@pytest.mark.parametrize(
    ("script", "alive"),
    [
        ("echo RUNNING", True),
        ("echo COMPLETING", True),
        ("echo PENDING", False),
        ("echo TIMEOUT", False),
        ("exit 0", False),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", False),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", None),
    ],
)
def test_whether_a_job_lives(
    script: str, alive: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(tmp_path, monkeypatch, "squeue", script)
    assert job_is_alive("7") is alive


def hold_elsewhere(lock: Path, **changes: object) -> None:
    record = {"host": "elsewhere", "pid": 1, "process_start": 1, "since": "then", "job": "7", "restart": 1}
    lock.write_text(json.dumps(record | changes))


@pytest.mark.parametrize(
    ("job", "restart", "squeue", "taken"),
    [
        ("7", "2", "exit 1", True),  # queued again: nothing is left of its last start
        ("7", "1", "echo RUNNING", False),  # a second step of the same start
        ("8", "0", "echo RUNNING", False),
        ("8", "0", "exit 0", True),
        ("8", "0", "echo PENDING", True),
        ("8", "0", "exit 1", False),  # no answer
        ("", "", "exit 0", True),
    ],
)
def test_a_job_takes_over_a_run_whose_holder_is_gone(
    job: str, restart: str, squeue: str, taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(tmp_path, monkeypatch, "squeue", squeue)
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", restart)
    lock = tmp_path / "lock"
    hold_elsewhere(lock)
    if taken:
        with hold_lock(lock):
            holder = read_holder(lock)
            assert holder is not None
            assert (holder.job, holder.restart) == (job, int(restart or 0))
    else:
        with pytest.raises(ConfigError, match="Slurm job 7"), hold_lock(lock):
            pass


def test_a_lock_of_no_job_on_another_host_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(tmp_path, monkeypatch, "squeue", "exit 0")
    hold_elsewhere(tmp_path / "lock", job="", restart=0)
    with pytest.raises(ConfigError, match="on host elsewhere"), hold_lock(tmp_path / "lock"):
        pass


def test_a_job_at_its_limit_is_told_from_one_that_was_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(tmp_path, monkeypatch, "squeue", "echo TimeLimit")
    assert reached_its_limit("7")
    play(tmp_path, monkeypatch, "squeue", "echo None")
    assert not reached_its_limit("7")


def test_compiled_kernels_lie_in_a_folder_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own = own_local_folder("k")
    assert own_local_folder("k") == own
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    own.chmod(0o777)  # somebody else may have put something there
    other = own_local_folder("k")
    assert other != own
    assert stat.S_IMODE(other.stat().st_mode) == 0o700
