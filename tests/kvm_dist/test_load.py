"""Files, overrides and defaults become one configuration; all that is wrong is said at once."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvm_dist.config import RunConfig
from kvm_dist.exit_codes import ConfigError, ExitCode
from kvm_dist.load import dump_config, load_config
from models.budget import FixedBudget, PowerLawBudget


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert caught.value.code == ExitCode.CONFIG == 64
    return str(caught.value).splitlines()


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "")).config == RunConfig()
    assert load_config(write(tmp_path, "# nothing but a comment\n")).config == RunConfig()


def test_defaults_are_below_extends_below_the_file_below_the_command_line(tmp_path: Path) -> None:
    write(tmp_path, "seed: 1\ntrain: {steps: 10, batch_sequences: 2}\noptimizer: {beta1: 0.5}\n", "base.yaml")
    path = write(tmp_path, "extends: base.yaml\ntrain:\n  steps: 20\n  log_every_steps: 5\n")
    loaded = load_config(path, ["train.log_every_steps=7"])
    config, source = loaded.config, loaded.provenance
    assert (config.seed, config.optimizer.beta1, config.train.batch_sequences) == (1, 0.5, 2)
    assert (config.train.steps, config.train.log_every_steps, config.train.accumulation) == (20, 7, 1)
    assert source["seed"] == f"{tmp_path}/base.yaml:1"
    assert source["train.batch_sequences"] == f"{tmp_path}/base.yaml:2"
    assert source["train.steps"] == f"{path}:3"
    assert source["train.log_every_steps"] == "command line: train.log_every_steps=7"
    assert source["train.accumulation"] == "default"


def test_every_leaf_has_an_origin(tmp_path: Path) -> None:
    loaded = load_config(write(tmp_path, ""), ["model.kvm.budget.kind=fixed"])
    keys = set(loaded.provenance)
    assert {"name", "model.layers", "model.kvm.budget.slots", "slurm.time_minutes"} <= keys
    assert not any(key.startswith("model.kvm.budget.factor") for key in keys)


def test_later_files_of_a_list_win_and_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path, "seed: 1\nname: a\n", "a.yaml")
    write(tmp_path, "seed: 2\n", "b.yaml")
    config = load_config(write(tmp_path / "deep", "extends: [../a.yaml, ../b.yaml]\n")).config
    assert (config.seed, config.name) == (2, "a")


def test_two_files_may_extend_the_same_third(tmp_path: Path) -> None:
    write(tmp_path, "seed: 3\n", "root.yaml")
    write(tmp_path, "extends: root.yaml\n", "a.yaml")
    write(tmp_path, "extends: root.yaml\n", "b.yaml")
    assert load_config(write(tmp_path, "extends: [a.yaml, b.yaml]\n")).config.seed == 3


def test_a_circle_of_extends_is_refused_and_named(tmp_path: Path) -> None:
    write(tmp_path, "extends: run.yaml\n", "other.yaml")
    (line,) = problems(write(tmp_path, "seed: 1\nextends: other.yaml\n"))
    assert line.startswith(f"{tmp_path}/other.yaml:1: extends: ")
    assert "run.yaml -> other.yaml -> run.yaml" in line


def test_a_chain_of_extends_has_an_end(tmp_path: Path) -> None:
    for number in range(12):
        write(tmp_path, f"extends: {number + 1}.yaml\n", f"{number}.yaml")
    write(tmp_path, "seed: 5\n", "12.yaml")
    assert load_config(tmp_path / "5.yaml").config.seed == 5
    (line,) = problems(tmp_path / "0.yaml")
    assert "more than 8 files deep" in line


def test_a_missing_file_names_who_asked_for_it(tmp_path: Path) -> None:
    path = write(tmp_path, "\nextends: [nowhere.yaml]\n")
    assert problems(path) == [
        f"{path}:2: extends: {tmp_path}/nowhere.yaml: cannot be read: No such file or directory; "
        "give the path of a YAML file"
    ]
    assert "cannot be read" in problems(tmp_path / "absent.yaml")[0]


def test_extends_cannot_be_given_on_the_command_line(tmp_path: Path) -> None:
    assert "works in files only" in problems(write(tmp_path, ""), "extends=other.yaml")[0]


def test_every_problem_is_reported_at_once_with_its_place(tmp_path: Path) -> None:
    write(tmp_path, "optimizer:\n  learning_rate: -1\n", "base.yaml")
    path = write(tmp_path, "extends: base.yaml\ntrain:\n  stepz: 5\nseed: soon\nseed: 2\nname: 010\n")
    lines = problems(path, "parallel.zero_stage=7", "nonsense", "train.batch_sequences=3", "parallel.data=2")
    text = "\n".join(lines)
    assert f"{path}:3: train.stepz: unknown key; did you mean train.steps?" in lines
    assert f'{path}:4: seed: wanted a whole number, got "soon"' in lines
    assert f"{path}:5: seed: given twice in one section, first at {path}:4; keep one of them" in lines
    assert f"{path}:6: 010: a number must not start with 0" in text
    assert f"{tmp_path}/base.yaml:2: optimizer.learning_rate: wanted a value > 0.0, got -1" in lines
    assert "command line: parallel.zero_stage=7: parallel.zero_stage: wanted 0, 1, 2 or 3, got 7" in lines
    assert "command line: nonsense: wanted key=value, for example train.steps=100" in lines
    assert "train.batch_sequences=3 is not divisible by parallel.data x train.accumulation = 2 x 1" in text
    assert len(lines) == 8


def test_no_word_of_the_validation_library_reaches_the_person(tmp_path: Path) -> None:
    text = "\n".join(problems(write(tmp_path, "model: {layers: [kwm], rwkv7: 3}\ntrain: [1]\nname: a/b\n")))
    for word in ("pydantic", "https://", "validation error", "input_value", "type=", "Value error"):
        assert word not in text


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("modle.hidden_size=8", "did you mean model?"),
        ("steps=5", "did you mean train.steps?"),
        ("model.kvm.chunck=8", "did you mean model.kvm.chunk?"),
        ("model.kvm.budget.slots=8", "known keys here: kind, factor, exponent, minimum, round_down"),
        ("parallel.sequence_parallel=2", "did you mean parallel.sequence?"),
    ],
)
def test_an_unknown_key_names_the_nearest_one(tmp_path: Path, override: str, hint: str) -> None:
    (line,) = problems(write(tmp_path, ""), override)
    assert line.startswith(f"command line: {override}: ")
    assert f"unknown key; {hint}" in line


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("train.steps=1e3", "a whole number, got 1000.0"),
        ("train.steps=true", "a whole number, got true"),
        ("train.steps='5'", 'a whole number, got "5"'),
        ("train.steps=", "a whole number, got nothing"),
        ("train.steps=0", "a value >= 1, got 0"),
        ("train=3", "a section of keys, got 3"),
        ("train.deterministic=yes", 'true or false, got "yes"'),
        ("optimizer.beta1=1", "a value < 1.0, got 1"),
        ("name=5", "text (in quotes if it looks like a number), got 5"),
        ("name=../x", "text that matches ^[A-Za-z0-9]"),
        ("model.layers=kvm", 'a list such as [a, b], got "kvm"'),
        ("model.kvm.budget.kind=big", "kind: 'fixed', 'power_law', 'saturating'"),
        ("parallel.precision=fp8", "'float32' or 'bfloat16', got \"fp8\""),
    ],
)
def test_a_wrong_value_names_what_was_wanted_and_got(tmp_path: Path, override: str, wanted: str) -> None:
    (line,) = problems(write(tmp_path, ""), override)
    assert f"wanted {wanted}" in line


def test_a_budget_of_another_kind_replaces_the_whole_budget(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {kvm: {budget: {kind: power_law, factor: 8, minimum: 64}}}\n")
    assert load_config(path, ["model.kvm.budget.minimum=32"]).config.model.kvm.budget == PowerLawBudget(
        factor=8, minimum=32
    )
    changed = load_config(path, ["model.kvm.budget={kind: fixed, slots: 512}"]).config
    assert changed.model.kvm.budget == FixedBudget(slots=512)


def test_the_last_of_two_equal_overrides_wins(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, ""), ["seed=1", "seed=2"]).config.seed == 2


def test_a_rule_over_several_keys_names_the_places_of_those_that_were_written(tmp_path: Path) -> None:
    path = write(tmp_path, "\ntrain: {batch_sequences: 5}\n")
    (line,) = problems(path, "parallel.data=2")
    assert line.startswith(f"command line: parallel.data=2, {path}:2: ") or line.startswith(
        f"{path}:2, command line: parallel.data=2: "
    )
    assert line.endswith("use 4 or 6")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_any_length_of_enough_blocks_is_taken(tmp_path: Path, ranks: int) -> None:
    overrides = [f"parallel.sequence={ranks}", "data.sequence_length=1001"]
    assert load_config(write(tmp_path, ""), overrides).config.data.sequence_length == 1001


def test_too_short_a_sequence_names_the_most_ranks_and_the_shortest_length(tmp_path: Path) -> None:
    overrides = ["model.kvm.chunk=64", "data.sequence_length=250"]
    (line,) = problems(write(tmp_path, ""), *overrides, "parallel.sequence=5")
    assert line.endswith("use parallel.sequence=4 or less, or data.sequence_length=257 or more")
    load_config(tmp_path / "run.yaml", [*overrides, "parallel.sequence=4"])
    load_config(tmp_path / "run.yaml", [overrides[0], "data.sequence_length=257", "parallel.sequence=5"])


def test_a_window_may_be_longer_than_a_shard(tmp_path: Path) -> None:
    overrides = ["parallel.sequence=4", "model.kvm.chunk=64", "model.kvm.window_chunks=4"]
    load_config(write(tmp_path, ""), [*overrides, "data.sequence_length=256"])


@pytest.mark.parametrize("uri", ["file:///x", "mlruns", "./x"])
def test_a_tracking_store_that_mlflow_no_longer_writes_is_refused(tmp_path: Path, uri: str) -> None:
    (line,) = problems(write(tmp_path, ""), f"tracking.uri={uri}")
    assert "sqlite:///PATH/mlflow.db" in line


def test_a_password_in_the_tracking_address_is_refused_and_not_repeated(tmp_path: Path) -> None:
    (line,) = problems(write(tmp_path, ""), "tracking.uri=https://me:hunter2@host/x")
    assert "MLFLOW_TRACKING_PASSWORD" in line
    assert "hunter2" not in line


def test_a_value_with_shell_text_stays_text(tmp_path: Path) -> None:
    for text in ("$(touch x)", "a;b", "'`id`'"):
        config = load_config(write(tmp_path, ""), [f"slurm.partition={text}"]).config
        assert config.slurm.partition == text.strip("'")


TEXTS = st.one_of(
    st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=20),
    st.sampled_from(
        ["010", "3e-4", "12:30:00", "yes", "null", "~", "true", "1_000", "", "a: b", "# c", "-", "\n", "1.5"]
    ),
)


@settings(max_examples=60, deadline=None)
@given(text=TEXTS, rate=st.floats(min_value=1e-300, max_value=1e300))
def test_a_dumped_configuration_loads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, text: str, rate: float
) -> None:
    config = RunConfig.model_validate(
        {
            "optimizer": {"learning_rate": rate},
            "evaluation": {"sample_prompts": [text or "x", "x"]},
            "tracking": {"experiment": text},
            "model": {"kvm": {"budget": {"kind": "fixed", "slots": 257}}},
        }
    )
    path = tmp_path_factory.mktemp("dump") / "config.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path).config == config


def test_an_empty_sample_prompt_is_refused_before_anything_runs(tmp_path: Path) -> None:
    found = problems(write(tmp_path, "evaluation: {sample_prompts: ['the ', '']}\n"))
    assert any("sample_prompts" in line for line in found)
