"""The doctor finds what is wrong and names the fix."""

import http.server
import threading
from pathlib import Path

import pytest

from kvm_dist.config import RunConfig
from launch import doctor
from launch.doctor import Finding, judge_version, release


@pytest.mark.parametrize(
    ("installed", "level"),
    [
        ("0.17.5", "fail"),
        ("0.17.6", "fail"),
        ("0.18.9", "fail"),
        ("0.19.3", "fail"),
        ("0.19.3+abc", "fail"),
        ("0.19.4", "ok"),
        ("0.20.0", "ok"),
    ],
)
def test_versions_of_deepspeed_that_lose_gradients_are_refused(installed: str, level: str) -> None:
    finding = judge_version("deepspeed", installed, "0.19.4", None)
    assert finding.level == level
    assert ("ZeRO-2 loses" in finding.found) == (release("0.17.6") <= release(installed) < release("0.19.4"))
    assert bool(finding.fix) == (level == "fail")


@pytest.mark.parametrize(
    ("installed", "level"), [("2.9.1", "fail"), ("2.10.0", "ok"), ("2.13.0+cpu", "ok"), ("2.14.0", "fail")]
)
def test_a_version_outside_the_range_is_refused(installed: str, level: str) -> None:
    finding = judge_version("torch", installed, "2.10", "2.14")
    assert finding.level == level
    assert level == "ok" or finding.fix == "pip install 'torch>=2.10,<2.14'"


def test_releases_are_compared_as_numbers() -> None:
    assert release("2.10") > release("2.9.1")
    assert release("1.0rc1") == release("1.0.0")


def test_an_installed_environment_passes_and_a_missing_package_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(finding.level == "ok" for finding in doctor.check_versions(RunConfig()))
    monkeypatch.setattr(doctor, "REQUIREMENTS", {"no-such-package-here": ("1", None)})
    (finding,) = doctor.check_versions(RunConfig())
    assert (finding.level, finding.fix) == ("fail", "pip install 'no-such-package-here>=1'")


def test_more_threads_than_cores_are_warned_about() -> None:
    few = RunConfig.model_validate({"parallel": {"threads_per_rank": 1}})
    many = RunConfig.model_validate({"parallel": {"data": 64, "threads_per_rank": 64}})
    assert [finding.level for finding in doctor.check_threads(few)] == ["ok"]
    assert [finding.level for finding in doctor.check_threads(many)] == ["warn"]


def test_a_missing_gpu_fails_only_a_run_that_asks_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert [f.level for f in doctor.check_devices(RunConfig())] == ["ok"]
    assert [f.level for f in doctor.check_devices(RunConfig(device="cuda"))] == ["fail"]


def test_a_run_root_that_cannot_be_written_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (finding,) = doctor.check_run_root(RunConfig(run_root=tmp_path / "file/runs"))
    assert (finding.level, "run_root=PATH" in finding.fix) == ("fail", True)
    found = list(doctor.check_run_root(RunConfig(run_root=tmp_path / "runs")))
    assert [f.what for f in found] == ["run root", "disk"]
    assert found[0].level == "ok"


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def tracking(uri: str | None, enabled: bool = True) -> Finding:
    config = RunConfig.model_validate({"tracking": {"uri": uri, "enabled": enabled}})
    (finding,) = doctor.check_tracking(config)
    return finding


def test_a_tracking_server_that_answers_passes_and_a_dead_one_is_warned_about() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        assert tracking(address).level == "ok"
        assert tracking(f"{address}/elsewhere").level == "warn"
        server.shutdown()
    assert tracking(address).level == "warn"
    assert tracking(address, enabled=False).level == "ok"
    assert tracking(None).level == "ok"


def test_a_tracking_server_that_never_answers_is_given_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setattr(doctor, "TRACKING_TIMEOUT_SECONDS", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        assert tracking(f"http://127.0.0.1:{silent.getsockname()[1]}").level == "warn"


def test_a_failed_check_gives_a_failing_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(f"run_root: {tmp_path}/runs\n")
    monkeypatch.setattr(doctor, "CHECKS", (doctor.check_run_root,))
    assert doctor.run_doctor(config, []) == 0
    (tmp_path / "file").touch()
    assert doctor.run_doctor(config, [f"run_root={tmp_path}/file/runs"]) != 0
    assert "make it writable" in capsys.readouterr().out.replace("\n", " ")
