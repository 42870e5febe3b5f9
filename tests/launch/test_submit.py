"""What `submit` hands to Slurm: the script, the environment, the snapshot. Needs no Slurm."""

import json
import shlex
import stat
import subprocess
from pathlib import Path

import pytest

from kvm_dist.exit_codes import ConfigError
from kvm_dist.load import load_config
from kvm_dist.run_lock import hold_lock
from kvm_dist.slurm_config import SlurmConfig
from launch.slurm import BatchJob, batch_script, is_stray
from launch.submit import Submission
from launch.submit_sweep import load_sweep, split_values
from tests.test_architecture import run_without_torch

HOSTILE = [
    "$(touch hacked)",
    "`touch hacked`",
    "a; touch hacked",
    "' ; touch hacked; '",
    '" x',
    "a b",
    "#",
    "~",
]

SBATCH = """#!/bin/sh
env > {folder}/environment
cat "$1" > {folder}/script
echo "Submitted batch job 7"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run.yaml").write_text("name: small\nparallel: {sequence: 2}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def cluster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an sbatch that only writes down what it gets."""
    program = folder / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(SBATCH.format(folder=folder))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return folder


def submit(folder: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """`kvm-dist submit` in a process that refuses torch."""
    ended = run_without_torch(folder, "submit", "run.yaml", *arguments)
    assert ended.returncode == code, ended.stderr
    return ended


def options(script: str) -> dict[str, str]:
    """The #SBATCH lines as Slurm reads them."""
    found = {}
    for line in script.splitlines():
        if line.startswith("#SBATCH "):
            (word,) = shlex.split(line.removeprefix("#SBATCH "))
            name, _, value = word.removeprefix("--").partition("=")
            found[name] = value
    return found


def batch_job(folder: Path, slurm: SlurmConfig, **variables: str) -> BatchJob:
    return BatchJob("small", slurm, 1, 0, ["true"], variables, folder, folder / "output")


def test_a_dry_run_shows_the_script_and_the_plan_and_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    arguments = ["slurm.nodes=2", "slurm.partition=gpu", "slurm.time_minutes=90", "device=cuda", "--dry-run"]
    shown = submit(folder, *arguments).stdout
    found = options(shown)
    expected = {"nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "1", "partition": "gpu", "time": "90"}
    assert expected.items() <= found.items()
    assert found["signal"] == "USR2@120"
    assert "requeue" in found
    assert "parameters" in shown
    assert not (folder / "runs").exists()


def test_every_key_reaches_its_option(folder: Path) -> None:
    slurm = SlurmConfig(
        account="a",
        qos="q",
        constraint="c&d",
        reservation="r",
        exclusive=True,
        memory_gib=0,
        cpus_per_task=3,
        requeues=0,
        signal_seconds=30,
        sbatch={"mail-type": "END", "nice": 0, "spread-job": True, "overcommit": False},
    )
    found = options(batch_script(batch_job(folder, slurm)))
    expected = {"account": "a", "qos": "q", "constraint": "c&d", "reservation": "r", "mem": "0"}
    expected |= {"cpus-per-task": "3", "signal": "USR2@30", "mail-type": "END", "nice": "0"}
    assert expected.items() <= found.items()
    assert {"exclusive", "spread-job", "no-requeue"} <= found.keys()
    assert {"overcommit", "requeue"}.isdisjoint(found)


@pytest.mark.parametrize("text", HOSTILE)
def test_no_value_runs_as_a_command(folder: Path, text: str) -> None:
    """Every field that takes text, as options and in the shell."""
    slurm = SlurmConfig(
        partition=text,
        account=text,
        qos=text,
        constraint=text,
        reservation=text,
        environment={"GIVEN": text},
        sbatch={"comment": text},
    )
    work = folder / text.replace("/", "_")
    job = BatchJob(
        "small", slurm, 1, 0, ["sh", "-c", 'echo "$GIVEN$OURS$1"', "x", text], {"OURS": text}, work, work
    )
    script = batch_script(job)
    found = options(script)
    assert [found[name] for name in ("partition", "account", "qos", "constraint", "reservation")] == [
        text
    ] * 5
    assert found["comment"] == text
    assert found["output"] == f"{work}-%j.out"
    ended = subprocess.run(["bash"], input=script, cwd=folder, capture_output=True, text=True, check=True)
    assert ended.stdout == f"{text * 3}\n"
    assert not (folder / "hacked").exists()


@pytest.mark.parametrize("key", ["partition", "account", "qos", "constraint", "reservation"])
def test_a_value_of_several_lines_is_refused(folder: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"slurm.{key}"):
        load_config(folder / "run.yaml", [f'slurm.{key}="a\\n#SBATCH --nodes=99"'])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("slurm.sbatch={nodes: 4}", "use slurm.nodes"),
        ("slurm.sbatch={--x: 4}", "no option of sbatch"),
        ("slurm.environment={a-b: x}", "no name of a variable"),
        ("slurm.signal_seconds=3600", "told to stop at its start"),
    ],
)
def test_options_that_contradict_the_rest_are_refused(folder: Path, override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(folder / "run.yaml", [override])


def test_short_jobs_are_told_in_time_too() -> None:
    assert SlurmConfig(time_minutes=2).lead_seconds == 30
    assert SlurmConfig(time_minutes=600).lead_seconds == 120


def test_a_job_inherits_nothing_of_the_job_it_was_submitted_from(
    cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stray = ["SLURM_CPU_BIND", "SLURM_ARRAY_TASK_ID", "SBATCH_ACCOUNT", "SUBMITIT_LOCAL_NTASKS", "PMIX_RANK"]
    stray += ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]
    for name in [*stray, "SLURM_CONF", "MY_OWN"]:
        monkeypatch.setenv(name, "kept")
    submit(cluster)
    seen = (cluster / "environment").read_text()
    assert [name for name in stray if f"{name}=" in seen] == []
    assert "SLURM_CONF=kept" in seen
    assert "MY_OWN=kept" in seen
    assert not is_stray("RANKING")


def test_a_job_runs_the_code_and_the_configuration_it_was_submitted_with(cluster: Path) -> None:
    said = submit(cluster, "train.steps=17").stdout
    assert "job 7" in said
    run = cluster / "runs" / "small"
    record = json.loads((run / "slurm" / "job.json").read_text())
    assert record["job"] == "7"
    submission = Submission.read(Path(record["submission"]))
    assert load_config(submission.configs[0]).config.train.steps == 17
    assert (submission.code / "launch" / "slurm_job.py").read_text().startswith('"""What a Slurm job')
    assert not list(submission.code.rglob("__pycache__"))
    assert f"export PYTHONPATH={submission.code}" in (cluster / "script").read_text()
    submit(cluster, "train.steps=17")
    assert (run / "slurm" / "0002" / "submission.json").exists()


def test_a_run_that_somebody_trains_is_not_submitted(cluster: Path) -> None:
    (cluster / "runs" / "small").mkdir(parents=True)
    with hold_lock(cluster / "runs" / "small" / "lock"):
        assert "is held by pid" in submit(cluster, code=64).stderr
    assert not (cluster / "script").exists()


def test_nodes_that_ranks_do_not_fill_evenly_are_refused(folder: Path) -> None:
    assert "slurm.nodes=3 does not divide" in submit(folder, "slurm.nodes=3", "--dry-run", code=64).stderr


def test_a_secret_does_not_enter_a_script(folder: Path) -> None:
    ended = submit(folder, "slurm.environment={HF_TOKEN: hunter2hunter2}", "--dry-run", code=64)
    assert "HF_TOKEN" in ended.stderr
    assert "hunter2" not in ended.stderr + ended.stdout


CLUSTERS = sorted((Path(__file__).parents[2] / "configs" / "cluster").glob("*.yaml"))


@pytest.mark.parametrize("cluster_file", CLUSTERS, ids=lambda path: path.stem)
def test_a_cluster_file_fits_behind_any_run_and_explains_every_line(cluster_file: Path, folder: Path) -> None:
    (folder / "both.yaml").write_text(f"name: both\nextends: [run.yaml, {cluster_file}]\n")
    ranks = 8 if cluster_file.stem != "cpu" else 2
    slurm = load_config(folder / "both.yaml", [f"parallel.data={ranks}"]).config.slurm
    script = batch_script(batch_job(folder, slurm))
    assert all(f"export {name}=" in script for name in slurm.environment)
    for line in cluster_file.read_text().splitlines():
        sets_something = line.strip() and not line.strip().startswith("#") and not line.endswith(":")
        assert not sets_something or " # " in line or line == "device: cpu" or line == "device: cuda", line


def test_without_slurm_there_is_advice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "login node" in submit(folder, code=70).stderr


@pytest.mark.parametrize(
    ("override", "values"),
    [
        ("a.b=1e-3,2e-3", ["a.b=1e-3", "a.b=2e-3"]),
        ("a=[1,2],[3]", ["a=[1,2]", "a=[3]"]),
        ('a="x,y"', ['a="x,y"']),
        ("a={kind: fixed, slots: 4},{kind: fixed, slots: 8}", None),
        ("a=1", ["a=1"]),
    ],
)
def test_commas_outside_of_brackets_and_quotes_part_values(override: str, values: list[str] | None) -> None:
    expected = values or ["a={kind: fixed, slots: 4}", "a={kind: fixed, slots: 8}"]
    assert split_values(override) == expected


def test_a_sweep_is_one_array_with_a_directory_for_every_combination(cluster: Path) -> None:
    submit(cluster, "optimizer.learning_rate=1e-3,2e-3", "seed=4,5", "train.steps=9")
    assert options((cluster / "script").read_text())["array"] == "0-3%4"
    folder = cluster / "runs" / "small"
    seen = set()
    for number, run in enumerate(sorted(folder.glob("[0-9]*"))):
        config = load_config(run / "config.yaml").config
        seen.add((config.optimizer.learning_rate, config.seed, config.train.steps))
        assert config.run_directory.absolute() == run
        assert config.tracking_uri.endswith("runs/mlflow.db")
        assert json.loads((run / "slurm" / "job.json").read_text())["job"] == f"7_{number}"
    assert seen == {(rate, seed, 9) for rate in (1e-3, 2e-3) for seed in (4, 5)}


@pytest.mark.parametrize("override", ["slurm.nodes=1,2", "name=a,b", "parallel.sequence=1,2"])
def test_what_all_jobs_of_an_array_share_does_not_vary(folder: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="share"):
        load_sweep(folder / "run.yaml", [override])
