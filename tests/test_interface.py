"""The names that people, scripts and checks rely on. A change here breaks somebody."""

import inspect
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from kvm_dist.config import RunConfig
from kvm_dist.counters import Counters
from kvm_dist.exit_codes import ExitCode
from kvm_dist.load import leaves
from kvm_dist.progress import Progress
from kvm_dist.reporting import Reporter
from kvm_dist.run_directory import RunDirectory
from kvm_dist.step import StepOutcome
from kvm_dist.tracking import NullTracker
from launch.cli import app
from models.kvm import FixedBudget, PowerLawBudget, SaturatingBudget, kvm_attention

VERBS: dict[str, dict[str, tuple[str, ...]]] = {  # verb -> below it -> what it takes
    "train": {"": ("config", "overrides")},
    "submit": {"": ("config", "overrides", "--dry-run")},
    "status": {"": ("run",)},
    "logs": {"": ("run", "--follow", "--rank")},
    "stop": {"": ("run",)},
    "resume": {"": ("run",)},
    "plan": {"": ("config", "overrides")},
    "data": {"prepare": ("source", "out"), "check": ("folder",)},
    "evaluate": {"": ("--task",)},
    "sample": {"": ("checkpoint", "--prompt")},
    "plot": {"": ("run",)},
    "import": {"": ()},
    "export": {"": ()},
    "checkpoint": {"list": ("run",), "verify": ("path",)},
    "bench": dict.fromkeys(("kvm", "step", "scaling", "data", "checkpoint"), ("--json",)),
    "config": {"show": ("config",), "schema": ()},
    "doctor": {"": ("config",)},
    "ui": {"": ()},
}
KEYS = [
    "run_root",
    "name",
    "seed",
    "train.steps",
    "train.batch_sequences",
    "train.accumulation",
    "data.sequence_length",
    "data.path",
    "optimizer.learning_rate",
    "checkpoint.every_steps",
    "checkpoint.keep",
    "tracking.uri",
    "parallel.data",
    "parallel.sequence",
    "parallel.zero_stage",
    "parallel.precision",
    "slurm.nodes",
    "slurm.partition",
    "slurm.time_minutes",
    "model.num_layers",
]
SECTIONS = [
    "name",
    "run_root",
    "seed",
    "model",
    "data",
    "optimizer",
    "schedule",
    "parallel",
    "train",
    "checkpoint",
    "tracking",
    "evaluation",
    "slurm",
]
METRICS = [
    "train/loss",
    "train/grad_norm",
    "train/learning_rate",
    "train/tokens",
    "perf/tokens_per_second",
    "perf/step_seconds",
    "data/wait_seconds",
    "fault/restarts",
    "fault/skipped_steps",
    "fault/goodput",
]


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_is_there_and_takes_what_it_took(verb: str) -> None:
    command = get_command(app).commands[verb]  # type: ignore[attr-defined]
    for below, taken in VERBS[verb].items():
        found = command.commands[below] if below else command
        names = {name for parameter in found.params for name in (parameter.name, *parameter.opts)}
        assert set(taken) <= names, f"{verb} {below}"


def test_no_command_is_missing_from_this_list() -> None:
    assert set(get_command(app).commands) - {"miniature"} == set(VERBS)  # type: ignore[attr-defined]
    assert isinstance(app, typer.Typer)


def test_sections_and_keys_of_a_configuration_keep_their_names() -> None:
    assert set(SECTIONS) <= set(RunConfig.model_fields)
    assert set(KEYS) <= set(leaves(RunConfig().model_dump(mode="json")))
    assert RunConfig().run_root == Path("runs")
    assert RunConfig().tracking_uri == "sqlite:///runs/mlflow.db"


def test_exit_codes_keep_their_numbers() -> None:
    assert {int(code) for code in ExitCode} == {0, 64, 65, 70, 71, 74, 75, 76, 93}
    numbers = {"CONFIG": 64, "DATA": 65, "CRASH": 70, "HANG": 71, "STORAGE": 74}
    numbers |= {"PREEMPTED": 75, "NOT_FINITE": 76, "NO_PROGRESS": 93}
    assert {name: int(ExitCode[name]) for name in numbers} == numbers


def test_files_of_a_run_directory_keep_their_places() -> None:
    run = RunDirectory(Path("runs/x"))
    places = [run.config_path, run.metrics_path, run.checkpoints, run.log_path(0), run.plots]
    places += [run.samples_path, run.postmortem_path, run.mlflow_run_id_path]
    assert [path.relative_to(run.path).as_posix() for path in places] == [
        "config.yaml",
        "metrics.jsonl",
        "checkpoints",
        "logs/rank-00000.log",
        "plots",
        "samples.jsonl",
        "postmortem.json",
        "mlflow_run_id",
    ]


def test_metrics_of_a_step_keep_their_names() -> None:
    outcome = StepOutcome(1.0, 1.0, 1e-3, 10, 0.5, False)
    reporter = Reporter(NullTracker(), Progress(1, 0), 1)
    with reporter.waiting_for_data():
        pass
    assert set(METRICS) <= set(reporter.step_metrics(Counters(step=1), outcome))


def test_the_operator_keeps_its_arguments_and_defaults() -> None:
    parameters = inspect.signature(kvm_attention).parameters
    ordered = ["q", "k", "v", "merge_gate", "key_norm_weight", "key_norm_bias"]
    assert list(parameters)[:8] == [*ordered, "state_temperature", "window_temperature"]
    defaults = {"chunk": 256, "window_chunks": 2, "sinks": 1, "rotary_dims": 0, "max_slots": None}
    defaults |= {"gate_appends": False, "gate_first_state": False, "value_radius": True}
    defaults |= {"state": None, "return_state": False, "backend": "auto"}
    assert {name: parameters[name].default for name in defaults} == defaults
    assert parameters["budget"].default is inspect.Parameter.empty
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in ("budget", *defaults))


def test_budgets_keep_their_defaults_and_hold_their_minimum() -> None:
    assert FixedBudget() == FixedBudget(slots=256)
    assert PowerLawBudget() == PowerLawBudget(factor=16, exponent=0.5, minimum=256, round_down=1)
    assert SaturatingBudget() == SaturatingBudget(limit=1024, minimum=1, round_down=1)
    assert [PowerLawBudget().slots_at(tokens) for tokens in (1, 256, 65_536)] == [256, 256, 4096]
    assert SaturatingBudget(minimum=7).slots_at(1) == 7
