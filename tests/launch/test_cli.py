"""The command line: exit codes, messages, and what the small commands print."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from kvm_dist.load import load_config
from launch.cli import app
from launch.ui import command
from parallel.placement import LOOPBACK
from tests.test_interface import VERBS


def kvm_dist(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    names = ("RANK", "WORLD_SIZE", "SLURM_PROCID")
    return subprocess.run(
        [sys.executable, "-m", "launch.cli", *arguments],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k not in names} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text("name: one\ndata: {path: shards}\n")
    return tmp_path


def commands(group: Any, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command, in the order of the help."""
    for name, one in group.commands.items():
        if hasattr(one, "commands"):
            yield from commands(one, (*before, name))
        else:
            yield (*before, name)


def test_help_begins_with_training_and_names_every_argument_in_capitals() -> None:
    found = list(commands(get_command(app)))
    assert found[0] == ("train",)
    for words in found:
        usage = re.search(r"Usage:.*?\n\s*\n", CliRunner().invoke(app, [*words, "--help"]).stdout, re.DOTALL)
        assert usage is not None
        assert re.findall(r"{[^}]*[a-z][^}]*}", usage[0]) == [], words


def test_help_names_every_command(folder: Path) -> None:
    text = kvm_dist(folder, "--help").stdout
    for verb in VERBS:
        assert f" {verb} " in text


def test_a_wrong_configuration_ends_with_64_and_every_problem_on_stderr(folder: Path) -> None:
    for verb in (["train"], ["plan"], ["config", "show"], ["doctor"]):
        ended = kvm_dist(folder, *verb, "run.yaml", "trian.steps=1", "seed=x")
        assert ended.returncode == 64
        assert "kvm-dist: command line: " in ended.stderr
        assert "trian: unknown key; did you mean train?" in ended.stderr
        assert 'seed: wanted a whole number, got "x"' in ended.stderr
        assert "Traceback" not in ended.stderr


def test_a_missing_file_ends_with_64(folder: Path) -> None:
    ended = kvm_dist(folder, "train", "absent.yaml")
    assert ended.returncode == 64
    assert "absent.yaml: cannot be read" in ended.stderr


def test_missing_data_ends_with_65_before_any_rank_starts(folder: Path) -> None:
    ended = kvm_dist(folder, "train", "run.yaml")
    assert ended.returncode == 65
    assert "data.path=shards" in ended.stderr
    assert list((folder / "runs/one/logs").iterdir()) == []


def test_a_run_root_that_cannot_be_written_ends_with_74(folder: Path) -> None:
    (folder / "runs").write_text("in the way")
    ended = kvm_dist(folder, "train", "run.yaml")
    assert ended.returncode == 74
    assert "run_root=PATH" in ended.stderr


def test_an_edited_configuration_ends_with_64_and_a_diff(folder: Path) -> None:
    assert kvm_dist(folder, "train", "run.yaml").returncode == 65
    (folder / "runs/one/metrics.jsonl").write_text('{"step": 1}\n')
    ended = kvm_dist(folder, "train", "run.yaml", "seed=7")
    assert ended.returncode == 64
    assert "  seed: 0 -> 7 (command line: seed=7)" in ended.stderr


def test_a_world_of_another_size_ends_with_64(folder: Path) -> None:
    ended = kvm_dist(folder, "train", "run.yaml", RANK="0", WORLD_SIZE="3", MASTER_PORT="1")
    assert ended.returncode == 64
    assert "wants 1 ranks but torchrun started 3" in ended.stderr
    assert not (folder / "runs").exists()


def test_a_rank_of_another_launcher_keeps_its_own_log_and_the_lock(folder: Path) -> None:
    (folder / "train.py").write_text(
        "import os, sys, pathlib\n"
        "from types import ModuleType\n"
        "fake = ModuleType('kvm_dist.train')\n"
        "def train(loaded):\n"
        "    print('training', loaded.config.name, pathlib.Path('runs/one/lock').exists())\n"
        "    assert pathlib.Path(os.environ['TRITON_CACHE_DIR']).is_dir()\n"
        "    raise ValueError('broken on purpose')\n"
        "fake.train = train\n"
        "sys.modules['kvm_dist.train'] = fake\n"
        "from launch.cli import main\n"
        "main()\n"
    )
    ranks = []
    for rank in (0, 1):
        own = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": "1", "TMPDIR": str(folder)}
        ranks.append(
            subprocess.run(
                [sys.executable, "train.py", "train", "run.yaml", "parallel.data=2"],
                cwd=folder,
                env=os.environ | own,
                capture_output=True,
                text=True,
            )
        )
    assert [ended.returncode for ended in ranks] == [70, 70]
    assert ranks[0].stdout == "training one True\n"
    assert "broken on purpose" in ranks[0].stderr
    assert ranks[1].stdout == ranks[1].stderr == ""
    for rank, lock in ((0, True), (1, False)):
        log = (folder / f"runs/one/logs/rank-{rank:05d}.log").read_text()
        assert f"training one {lock}" in log
        assert "ValueError: broken on purpose" in log
    assert not (folder / "runs/one/lock").exists()


def test_an_unexpected_error_ends_with_70_and_its_traceback(folder: Path) -> None:
    program = "from launch.ending import exit_code_of, leave; leave(exit_code_of(lambda: 1 / 0))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 70
    assert "ZeroDivisionError" in ended.stderr


def test_config_show_prints_every_value_with_its_origin_and_loads_back(folder: Path) -> None:
    ended = kvm_dist(
        folder, "config", "show", "run.yaml", "train.steps=9", 'evaluation.sample_prompts=["a # b", "c\\nd"]'
    )
    assert ended.returncode == 0
    lines = {line.split("#")[0].strip(): line.split("#")[-1].strip() for line in ended.stdout.splitlines()}
    assert lines["name: one"] == "run.yaml:1"
    assert lines["path: shards"] == "run.yaml:2"
    assert lines["steps: 9"] == "command line: train.steps=9"
    assert lines["keep: 3"] == "default"
    (folder / "shown.yaml").write_text(ended.stdout)
    overrides = ["train.steps=9", 'evaluation.sample_prompts=["a # b", "c\\nd"]']
    assert load_config(folder / "shown.yaml").config == load_config(folder / "run.yaml", overrides).config


def test_config_schema_describes_every_section(folder: Path) -> None:
    schema = json.loads(kvm_dist(folder, "config", "schema").stdout)
    assert {"name", "model", "data", "optimizer", "parallel", "train", "extends"} <= set(schema["properties"])
    assert schema["additionalProperties"] is False


def test_data_is_prepared_and_checked_and_damage_ends_with_65(folder: Path) -> None:
    (folder / "texts").mkdir()
    for number in range(4):
        (folder / f"texts/{number}.txt").write_text(f"text number {number}\n" * 20)
    prepared = kvm_dist(folder, "data", "prepare", "texts", "shards")
    assert prepared.returncode == 0, prepared.stderr
    assert "tokenizer bytes" in prepared.stdout
    checked = kvm_dist(folder, "data", "check", "shards")
    assert checked.returncode == 0
    assert "train: 1 shards" in checked.stdout
    (shard,) = (folder / "shards").glob("train-*.tar")
    data = bytearray(shard.read_bytes())
    data[600] ^= 1
    shard.write_bytes(data)
    damaged = kvm_dist(folder, "data", "check", "shards")
    assert damaged.returncode == 65
    assert shard.name in damaged.stderr


def test_checkpoints_of_a_run_without_any_are_said_to_be_none(folder: Path) -> None:
    ended = kvm_dist(folder, "checkpoint", "list", ".")
    assert (ended.returncode, "no checkpoint yet" in ended.stdout) == (0, True)
    assert kvm_dist(folder, "checkpoint", "list", "absent").returncode == 74
    assert kvm_dist(folder, "checkpoint", "verify", "absent").returncode == 74


def test_a_picture_of_nothing_ends_with_74(folder: Path) -> None:
    (folder / "runs/one").mkdir(parents=True)
    for run, problem in (("runs/absent", "no such run directory"), ("runs/one", "no metrics to draw")):
        ended = kvm_dist(folder, "plot", run)
        assert ended.returncode == 74
        assert problem in ended.stderr


def test_the_user_interface_listens_on_the_loopback_address_only(folder: Path) -> None:
    arguments = command("sqlite:////x/mlflow.db", 5000)
    assert arguments[arguments.index("--host") + 1] == "127.0.0.1"
    assert arguments[arguments.index("--backend-store-uri") + 1] == "sqlite:////x/mlflow.db"
    ended = kvm_dist(folder, "ui", "--run-root", "absent")
    assert (ended.returncode, "no such folder" in ended.stderr) == (64, True)


def test_a_port_that_is_taken_ends_with_64(folder: Path) -> None:
    with socket.socket() as other:
        other.bind((LOOPBACK, 0))
        other.listen()
        ended = kvm_dist(folder, "ui", "--run-root", ".", "--port", str(other.getsockname()[1]))
    assert ended.returncode == 64
    assert "choose another one with --port" in ended.stderr


def test_values_with_shell_text_run_nothing(folder: Path) -> None:
    overrides = [
        "slurm.partition=$(touch hacked)",
        "tracking.experiment=a; touch hacked",
        "seed=$(touch hacked)",
    ]
    assert kvm_dist(folder, "train", "run.yaml", *overrides).returncode == 64
    assert kvm_dist(folder, "train", "run.yaml", *overrides[:2]).returncode == 65
    assert not (folder / "hacked").exists()
