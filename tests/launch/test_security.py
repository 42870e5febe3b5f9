"""A real run: nothing it leaves behind holds a secret, and nothing of it listens to the outside."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.tiny_run import TinyRun
from tests.support.planted import SECRETS, files_with_secrets

ROOT = Path(__file__).parents[2]
EVERYWHERE = ("00000000", "0" * 32)  # 0.0.0.0 and :: as the kernel writes them
LISTENING = "0A"


def descendants(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:
            continue
        for child in children:
            yield from descendants(int(child))


def listening_addresses(pids: list[int]) -> set[str]:
    """Local addresses, in hexadecimal, of the sockets on which any of the processes listens."""
    held = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                held.add(os.readlink(link))
            except OSError:
                continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in held:
                found.add(fields[1].partition(":")[0])
    return found


def test_a_run_listens_to_itself_only_and_leaves_no_secret(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    run = TinyRun(tmp_path, corpus)
    process = run.start(["tracking.enabled=true", "tracking.system_metrics_seconds=1"])
    addresses: set[str] = set()
    while process.poll() is None and run.last_step() < 9:
        if run.last_step() >= 1:
            addresses |= listening_addresses(list(descendants(process.pid)))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert addresses, "the ranks met nowhere: the test shows nothing"
    assert addresses.isdisjoint(EVERYWHERE)
    assert files_with_secrets(tmp_path) == []
    assert "planted" not in output
    for folder in (run.directory, *run.directory.rglob("*")):
        if folder.is_dir():
            assert stat.S_IMODE(folder.stat().st_mode) & 0o027 == 0, folder


def test_the_search_finds_what_was_planted(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/file.bin").write_bytes(b"\xff" + SECRETS["HF_TOKEN"].encode())
    assert files_with_secrets(tmp_path) == [tmp_path / "deep/file.bin"]


@pytest.mark.parametrize("floor", ["mlflow>=3.17", "torch>=2.10"])
def test_versions_with_known_holes_are_not_admitted(floor: str) -> None:
    assert f'"{floor}' in (ROOT / "pyproject.toml").read_text()


def test_the_threat_model_says_what_is_trusted() -> None:
    said = (ROOT / "SECURITY.md").read_text()
    for subject in ("configuration files", "training data", "checkpoints", "tracking server", "0750"):
        assert subject in said
