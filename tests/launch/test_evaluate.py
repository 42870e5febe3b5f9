"""`evaluate`: what it prints, leaves behind and refuses."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvm_dist.convert.exporting import export_model
from kvm_dist.evaluate.tasks import Options
from kvm_dist.exit_codes import ConfigError, DataError, StorageError
from launch.ending import exit_code_of
from launch.evaluate_commands import evaluate, split_targets
from launch.plot_command import plot
from tests.kvm_dist.evaluate.tiny_checkpoint import TinyRun, make_tiny_run
from tests.test_architecture import run_without_torch


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_tiny_run(tmp_path_factory.mktemp("evaluated"))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_run_gets_a_record_a_picture_and_a_table_for_its_newest_checkpoint(
    tiny_run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    options = Options(minimum_tokens=800, block_tokens=100)
    evaluate([str(tiny_run.directory)], "position-loss", None, options)
    shown = capsys.readouterr()
    record_path = tiny_run.directory / "evaluations" / "position-loss-step-00000050.json"
    picture = tiny_run.directory / "plots" / "position-loss-step-00000050.png"
    assert f"position-loss of {tiny_run.checkpoint} (step 50)\n" in shown.out
    assert "700 to 800" in shown.out
    assert shown.out.splitlines()[-2:] == [str(record_path), str(picture)]
    assert "token " in shown.err
    assert "100%" in shown.err
    record = json.loads(record_path.read_text())
    assert (record["name"], record["step"], record["device"]) == ("tiny", 50, "cpu")
    assert len(record["details"]["blocks"]["mean"]) == 8
    before = picture.read_bytes()
    picture.unlink()
    plot(tiny_run.directory)
    assert picture.read_bytes() == before
    assert str(picture) in capsys.readouterr().out


def test_several_models_are_compared_and_overrides_change_them(tiny_run: TinyRun) -> None:
    targets = [str(tiny_run.directory), str(tiny_run.checkpoint), "model.kvm.budget.factor=9"]
    options = Options(minimum_tokens=800, block_tokens=400, limit=1)
    evaluate(targets, "position-loss", Path("out"), options)
    name = "position-loss-tiny-step-00000050-model.kvm.budget.factor=9"
    made = ["position-loss-2-compared.png", f"{name}.json", f"{name}.png"]
    assert sorted(path.name for path in Path("out").iterdir()) == made
    assert json.loads(Path("out", f"{name}.json").read_text())["overrides"] == ["model.kvm.budget.factor=9"]


def test_another_budget_gives_another_loss(tiny_run: TinyRun) -> None:
    losses = []
    for overrides in ([], ["model.kvm.budget.factor=9"]):
        evaluate([str(tiny_run.directory), *overrides], "perplexity", Path("out"), Options(tokens=(600,)))
    for path in sorted(Path("out").glob("*.json")):
        losses.append(json.loads(path.read_text())["metrics"]["loss"])
    assert len(set(losses)) == 2


def test_results_of_another_question_are_kept_and_those_of_the_same_are_replaced(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(**chosen: Any) -> dict[str, Any]:
        evaluate([str(tiny_run.directory)], "perplexity", Path("out"), Options(limit=1, **chosen))
        record: dict[str, Any] = json.loads(Path("out/perplexity-tiny-step-00000050.json").read_text())
        return record

    def contexts() -> list[int]:
        records = [json.loads(path.read_text()) for path in Path("out").glob("*.json")]
        return sorted(record["settings"]["context"] for record in records)

    assert ask(tokens=(300,))["asked"] == ["tokens=300", "limit=1"]
    assert "kept" not in capsys.readouterr().err
    ask(tokens=(300,))
    assert contexts() == [300]
    assert "kept" not in capsys.readouterr().err
    assert ask(tokens=(450,))["settings"]["context"] == 450
    assert contexts() == [300, 450]
    (kept,) = Path("out").glob("perplexity-tiny-step-00000050-tokens=300-limit=1-*.json")
    assert capsys.readouterr().err.endswith(f"earlier results of another question are kept: {kept}\n")
    ask()
    ask(tokens=(300,))
    assert contexts() == [96, 300, 300, 450]
    ask()
    assert contexts() == [96, 96, 300, 450], "one file a question, and the newest answer under the plain name"


def test_kept_results_keep_their_picture(tiny_run: TinyRun) -> None:
    for block in (200, 400):
        options = Options(minimum_tokens=800, block_tokens=block, limit=1)
        evaluate([str(tiny_run.directory)], "position-loss", Path("out"), options)
    names = {path.stem for path in Path("out").glob("*.json")}
    assert len(names) == 2
    assert {path.stem for path in Path("out").glob("*.png")} == names


def test_a_reader_who_has_enough_costs_no_results(tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody_reads(*_: object) -> None:
        raise SystemExit(141)

    tracked: list[Path] = []
    monkeypatch.setattr("launch.evaluate_commands._print_table", nobody_reads)
    monkeypatch.setattr("launch.evaluate_commands._track", lambda *given: tracked.extend(given[-1]))
    options = Options(minimum_tokens=800, block_tokens=200, limit=1)
    with pytest.raises(SystemExit):
        evaluate([str(tiny_run.directory)], "position-loss", Path("out"), options)
    assert sorted(Path("out").iterdir()) == sorted(tracked)
    assert len(tracked) == 2


def test_whatever_lies_where_results_go_is_kept(tiny_run: TinyRun) -> None:
    path = Path("out/perplexity-tiny-step-00000050.json")
    path.parent.mkdir()
    path.write_text("notes of somebody")
    evaluate([str(tiny_run.directory)], "perplexity", Path("out"), Options(limit=1))
    (kept,) = set(path.parent.iterdir()) - {path}
    assert kept.read_text() == "notes of somebody"


def test_folders_of_one_name_do_not_replace_each_others_results(tiny_run: TinyRun, tmp_path: Path) -> None:
    for place in ("a", "b"):
        export_model(tiny_run.directory, tmp_path / place / "mine", "huggingface", None, 10**9, silent=True)
    options = Options(data=tiny_run.data, tokens=(300,), limit=1)
    with pytest.raises(ConfigError, match=r"b/mine would replace those of .*a/mine.*--out DIR"):
        evaluate(["a/mine", "b/mine"], "perplexity", None, options)
    assert json.loads(Path("evaluations/perplexity-mine.json").read_text())["name"] == "mine"


def test_folders_are_told_from_overrides_by_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "a=b").mkdir()
    assert split_targets(["a=b", "seed=1"]) == ([Path("a=b")], ["seed=1"])
    with pytest.raises(ConfigError, match="no checkpoint among the arguments"):
        split_targets(["seed=1"])


def test_what_is_missing_decides_the_exit_code(tiny_run: TinyRun, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="absent: no such folder"):
        evaluate(["absent"], "perplexity", None, Options())
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(StorageError, match="has no checkpoint yet"):
        evaluate(["run"], "perplexity", None, Options())
    exported = tmp_path / "exported"
    export_model(tiny_run.directory, exported, "huggingface", None, 10**9, silent=True)
    with pytest.raises(
        DataError, match=f"no prepared data at data.path=data/.* below {tmp_path}; .*--data DIR"
    ):
        evaluate([str(exported)], "perplexity", None, Options())
    with pytest.raises(DataError, match="no dataset at absent"):
        evaluate([str(tiny_run.directory)], "perplexity", None, Options(data=Path("absent")))
    with pytest.raises(ConfigError, match="take back what was changed"):
        evaluate([str(tiny_run.directory), "model.hidden_size=64"], "perplexity", None, Options())


def test_overrides_that_ask_for_other_parameters_end_with_64(tiny_run: TinyRun) -> None:
    with pytest.raises(ConfigError, match=r"step-00000050 holds no layers\.3\..* and \d+ more; take back"):
        evaluate([str(tiny_run.directory), "model.num_layers=5"], "perplexity", None, Options())


def test_options_that_a_task_does_not_read_are_refused_before_anything_is_opened() -> None:
    options = Options(haystack=Path("essays"), needles=("S1",), depths=(0.5,), limit=1, seed=3)
    with pytest.raises(
        ConfigError, match="--task perplexity does not read --haystack, --needle, --depth; leave"
    ):
        evaluate(["absent"], "perplexity", None, options)
    with pytest.raises(
        ConfigError, match="--task needle does not read --block-tokens, what stands behind its"
    ):
        evaluate(["absent"], "needle:x", None, Options(block_tokens=7))


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("measured first")

    monkeypatch.setattr("kvm_dist.evaluate.perplexity.evaluate", measured)
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="file: it is a file; make room or permissions, or give --out DIR"):
        evaluate([str(tiny_run.directory)], "perplexity", Path("file/out"), Options())
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)
    with pytest.raises(
        StorageError, match=f"{tmp_path}: Permission denied; make room or permissions, or give"
    ):
        evaluate([str(tiny_run.directory)], "perplexity", Path("new/out"), Options())
    assert sorted(tmp_path.iterdir()) == [tmp_path / "file"]


def test_an_interrupted_evaluation_leaves_no_record(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvm_dist.evaluate.perplexity.next_token_losses", interrupt)
    assert (
        exit_code_of(lambda: evaluate([str(tiny_run.directory)], "perplexity", Path("out"), Options())) == 70
    )
    assert not Path("out").exists()


def test_an_unknown_task_ends_with_64_before_torch_is_imported(tmp_path: Path) -> None:
    ended = run_without_torch(tmp_path, "evaluate", "absent", "--task", "neddle")
    assert ended.returncode == 64
    assert "did you mean needle?" in ended.stderr


CHOICE = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}]
"""


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed")
def test_the_harness_runs_a_local_task_without_network(tiny_run: TinyRun, tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "choice.yaml").write_text(CHOICE)
    questions = [{"question": f"line {n}", "choices": [" of", " word"], "answer": 0} for n in range(3)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions))
    command = [sys.executable, "-m", "launch.cli", "evaluate", str(tiny_run.directory)]
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    for task, code in (("tiny_choice", 0), ("lambada_openai", 65)):
        ended = subprocess.run(
            [*command, "--task", f"lm-eval:{task}", "--tasks-dir", "tasks", "--out", "out"],
            env=os.environ | {"HF_HOME": str(tmp_path / "cache"), "PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
        assert ended.returncode == code, ended.stderr
    record = json.loads(Path("out", "lm-eval-tiny_choice-tiny-step-00000050.json").read_text())
    assert record["details"]["samples"]["tiny_choice"]["effective"] == 3
