"""`kvm-dist import` and `export` as a person types them: exit codes, messages, and a sample in the end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvm_dist.convert.importing import import_published
from launch.cli import app
from launch.convert_commands import export, import_folder
from launch.ending import exit_code_of
from tests.kvm_dist.converted import GIGABYTE, published_copy, read_tensors, replace_tensors
from tests.kvm_dist.test_convert_export import make_run


def kvm_dist(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    names = ("RANK", "WORLD_SIZE", "SLURM_PROCID")
    return subprocess.run(
        [sys.executable, "-m", "launch.cli", *arguments],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k not in names},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_run_is_exported_and_writes_on_in_a_fresh_process(tmp_path: Path) -> None:
    make_run(tmp_path)
    ended = kvm_dist(tmp_path, "export", "runs/little", "model", "--dtype", "bfloat16")
    assert ended.returncode == 0, ended.stderr
    assert "model: exported a model of 2 layers (1 kvm, 1 rwkv7), hidden size 32" in ended.stdout
    assert "state a licence in model/README.md" in ended.stdout
    assert "writing model: " in ended.stderr
    ended = kvm_dist(tmp_path, "sample", "model", "--prompt", "so ", "--tokens", "4", "--temperature", "0")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("so ")
    ended = kvm_dist(tmp_path, "export", "model", "mit Leerzeichen")
    assert "kvm-dist sample 'mit Leerzeichen' --prompt TEXT" in ended.stdout, (
        "a line that a shell understands"
    )
    ended = kvm_dist(tmp_path, "export", "model", "other", "--shard-gigabytes", "inf")
    assert ended.returncode == 2, ended.stderr


def test_a_published_folder_is_imported_by_its_verb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, ours = published_copy(tmp_path / "theirs", use_l2wrap=True), tmp_path / "ours"
    app(["import", str(theirs), str(ours), "--shard-gigabytes", "0.0001"], standalone_mode=False)
    said = capsys.readouterr().out
    assert "ours: imported a model of 4 layers (2 sliding_window, 2 kvm), hidden size 32" in said
    assert "note: use_l2wrap is on" in said
    assert "next: import it once more with --tokenizer NAME" in said
    assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) == 3


def test_exit_codes_tell_settings_weights_and_damage_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def code(source: Path) -> int:
        return exit_code_of(lambda: import_folder(source, tmp_path / "out", None, None, 5.0))

    assert code(published_copy(tmp_path / "settings", use_block_lambdas=True)) == 64
    weights = published_copy(tmp_path / "weights")
    tensors = read_tensors(weights)
    replace_tensors(weights, {name: z for name, z in tensors.items() if name != "lm_head.weight"})
    assert code(weights) == 65
    damaged = published_copy(tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"not tensors")
    assert code(damaged) == 74
    assert code(tmp_path / "absent") == 74
    assert exit_code_of(lambda: export(tmp_path / "absent", tmp_path / "out", "huggingface", None, 5.0)) == 74
    said = capsys.readouterr().err
    for expected in ("use_block_lambdas=True", "lm_head.weight is missing", "damaged or cut off"):
        assert expected in said
    assert not (tmp_path / "out").exists()


def test_an_imported_folder_is_exported_in_their_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import_published(
        published_copy(tmp_path / "theirs"), tmp_path / "ours", None, None, GIGABYTE, silent=True
    )
    export(tmp_path / "ours", tmp_path / "back", "authors", "float32", 5.0)
    assert "from the folder ours" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == ["config.json", "model.safetensors"]
