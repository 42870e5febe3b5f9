"""The doctor finds what is wrong and names the fix."""

import http.server
import importlib.metadata
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from packaging.requirements import Requirement

from kvm_dist.config import RunConfig
from launch import doctor, doctor_devices, doctor_engine, doctor_versions
from launch.doctor_data import check_data
from launch.doctor_devices import check_devices, file_system, kernel_cache
from launch.doctor_engine import check_engine
from launch.doctor_ranks import code_digest, differences
from launch.doctor_versions import check_pairs, check_tested, check_versions, judge_version, release
from launch.finding import Finding
from tests.kvm_dist.data.corpus import small_dataset
from tests.support.constraints import needed


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
    assert all(finding.level == "ok" for finding in check_versions(RunConfig()))
    monkeypatch.setattr(doctor_versions, "REQUIREMENTS", {"no-such-package-here": ("1", None)})
    (finding,) = check_versions(RunConfig())
    assert (finding.level, finding.fix) == ("fail", "pip install 'no-such-package-here>=1'")


def pretend(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """An installation of the tested versions, but for some."""
    installed = doctor_versions.tested_versions()
    installed |= {name.replace("_", "-"): version for name, version in versions.items()}
    monkeypatch.setattr("importlib.metadata.version", installed.__getitem__)


def verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    monkeypatch.setattr(doctor, "CHECKS", (check_versions, check_pairs, check_tested))
    code = doctor.run_doctor(None, [])
    return code, " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_the_tested_versions_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch)
    code, said = verdict(monkeypatch, capsys)
    assert code == 0
    assert f"all {len(doctor_versions.REQUIREMENTS)} as in constraints.txt" in said


@pytest.mark.parametrize(
    ("versions", "code", "words"),
    [
        ({"fla_core": "0.5.1"}, 70, ["flash-linear-attention 0.6.0 wants fla-core==0.6.0", "0.5.1"]),
        ({"safetensors": "0.7.0"}, 70, ["transformers", "wants safetensors>=", "installed is 0.7.0"]),
        ({"deepspeed": "0.19.2"}, 70, ["ZeRO-2 loses part of a gradient"]),
        ({"mlflow": "3.99.0"}, 0, ["mlflow 3.99.0 (tested: "]),
    ],
)
def test_versions_that_do_not_go_together_fail_and_untested_ones_are_told(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    versions: dict[str, str],
    code: int,
    words: list[str],
) -> None:
    pretend(monkeypatch, **versions)
    found, said = verdict(monkeypatch, capsys)
    assert found == code, said
    for word in words:
        assert word in said


def test_a_pair_is_judged_by_what_it_says_for_this_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a CUDA build of torch pins its triton."""
    asked = {"torch": ['triton==3.7.0; platform_system == "Linux"', 'triton<1; platform_system == "Windows"']}
    asked["torch"] += ['pydantic<1; extra == "opt"', "numpy", "triton!=3.8.*", "triton (>=3)"]
    pretend(monkeypatch, triton="3.9.0")
    monkeypatch.setattr("importlib.metadata.requires", asked.get)
    (finding,) = check_pairs(RunConfig())
    assert (finding.level, finding.fix) == ("fail", "pip install 'triton==3.7.0'")


def test_every_dependency_has_a_tested_version() -> None:
    lines = importlib.metadata.requires("kvm-dist") or []
    direct = {Requirement(line).name for line in lines if "extra ==" not in line}
    assert direct <= doctor_versions.tested_versions().keys() & needed().keys()


def test_the_doctor_asks_for_the_versions_that_the_installation_takes() -> None:
    installed = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for name, (lowest, too_new) in doctor_versions.REQUIREMENTS.items():
        wanted = f'"{name}>={lowest}' + (f",<{too_new}" if too_new else "")
        assert f'{wanted}"' in installed or f"{wanted};" in installed, wanted


def test_more_threads_than_cores_are_warned_about() -> None:
    few = RunConfig.model_validate({"parallel": {"threads_per_rank": 1}})
    many = RunConfig.model_validate({"parallel": {"data": 64, "threads_per_rank": 64}})
    assert [finding.level for finding in doctor.check_threads(few)] == ["ok"]
    assert [finding.level for finding in doctor.check_threads(many)] == ["warn"]


@pytest.mark.parametrize(
    ("threads", "level", "said"),
    [
        ("1", "ok", "1 ranks x 1 threads"),
        ("999", "warn", "1 ranks x 999 threads"),
        ("many", "fail", "'many'"),
    ],
)
def test_threads_are_those_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, threads: str, level: str, said: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    (finding,) = doctor.check_threads(RunConfig())
    assert finding.level == level
    assert said in finding.found


def test_a_missing_gpu_fails_only_a_run_that_asks_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert [f.level for f in check_devices(RunConfig())] == ["ok"]
    assert [f.level for f in check_devices(RunConfig(device="cuda"))] == ["fail"]


class Gpus:
    """torch.cuda where there are two."""

    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 2)
    get_device_name = staticmethod(lambda index: "AMD Instinct MI325X")
    get_device_capability = staticmethod(lambda index: (9, 4))
    get_device_properties = staticmethod(lambda index: SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-"))


def test_gpus_are_named_with_architecture_and_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, mounts = tmp_path / "version", tmp_path / "mounts"
    driver.write_text("6.12.12\n")
    mounts.write_text(f"/dev/sda1 / ext4 rw 0 0\nhost:/home {tmp_path} nfs4 rw 0 0\n")
    monkeypatch.setattr("torch.cuda", Gpus)
    monkeypatch.setattr(doctor_devices, "DRIVERS", (tmp_path / "absent", driver))
    monkeypatch.setattr(doctor_devices, "file_system", lambda path: file_system(path, mounts))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    device, cache, _ = check_devices(RunConfig())
    assert device.found.startswith("2 x AMD Instinct MI325X (gfx942) (")
    assert device.found.endswith(", driver 6.12.12)")
    assert (cache.level, "TRITON_CACHE_DIR" in cache.fix) == ("warn", True)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/var/cache")
    assert list(check_devices(RunConfig()))[1].level == "ok"


@pytest.mark.parametrize(
    ("compiler", "headers", "level", "said"),
    [(True, True, "ok", "/usr/bin/gcc"), (False, True, "warn", "no gcc"), (True, False, "warn", "Python.h")],
)
def test_what_triton_builds_in_c_needs_a_compiler_and_headers(
    compiler: bool,
    headers: bool,
    level: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda", Gpus)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(
        doctor_devices.shutil, "which", lambda name: "/usr/bin/gcc" if compiler and name == "gcc" else None
    )
    monkeypatch.setattr(doctor_devices.sysconfig, "get_path", lambda name, scheme: str(tmp_path))
    if headers:
        (tmp_path / "Python.h").touch()
    *_, finding = check_devices(RunConfig())
    assert (finding.what, finding.level) == ("C compiler", level)
    assert said in finding.found


def test_the_file_system_of_a_folder_is_that_of_the_nearest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "tmpfs /nfs\\040home/t tmpfs rw 0 0\nfs:/h /nfs\\040home nfs rw 0 0\n/dev/sda1 / ext4 rw 0 0\n"
    )
    kinds = {"/x": "ext4", "/nfs home/me/.triton": "nfs", "/nfs home/t/a": "tmpfs", "/nfs home2": "ext4"}
    assert {path: file_system(Path(path), mounts) for path in kinds} == kinds
    assert file_system(Path("/x"), tmp_path / "absent") == "unknown"
    assert kernel_cache({"TRITON_HOME": "/fast"}) == Path("/fast/.triton/cache")
    assert kernel_cache({"TRITON_HOME": "/fast", "TRITON_CACHE_DIR": "/own"}) == Path("/own")


def test_the_data_of_a_run_is_looked_at_before_it_starts(tmp_path: Path) -> None:
    def judged(**changes: object) -> tuple[str, str]:
        data = {"path": tmp_path / "data", "sequence_length": 32, **changes}
        train = {"steps": 50, "batch_sequences": 4}
        (finding,) = check_data(RunConfig.model_validate({"data": data, "train": train}))
        assert bool(finding.fix) == (finding.level != "ok")
        return finding.level, finding.found

    level, found = judged(source="python-stdlib")
    assert (level, "will be prepared from python-stdlib" in found) == ("ok", True)
    level, found = judged()
    assert (level, "no dataset at" in found) == ("fail", True)
    small_dataset(tmp_path)
    level, found = judged()
    assert (level, "all of it is shuffled together" in found) == ("ok", True)
    level, found = judged(shuffle_tokens=3000)
    assert (level, "shuffled together: 1 of 6 shards at a time" in found) == ("warn", True)
    assert judged(shuffle_tokens=16000)[0] == "ok"
    level, found = judged(tokenizer="rwkv-world")
    assert (level, "was prepared with tokenizer 'bytes'" in found) == ("fail", True)


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
    monkeypatch.setattr(doctor, "CHECKS_OF_A_RUN", ())
    assert doctor.run_doctor(config, []) == 0
    (tmp_path / "file").touch()
    assert doctor.run_doctor(config, [f"run_root={tmp_path}/file/runs"]) != 0
    assert "make it writable" in capsys.readouterr().out.replace("\n", " ")


def test_ranks_that_differ_are_told_apart() -> None:
    same = {"host": "a", "torch": "2.13", "code": code_digest()}
    (line,) = differences([same, {**same, "host": "b"}])
    assert line == ("ranks", "2 on a, b; the same on all: 2 of 2", "")
    other = {**same, "host": "b", "torch": "2.12", "NCCL_DEBUG": "WARN"}
    _, version, variable = differences([same, same, other])
    assert version[:2] == ("torch", "2.13 on rank 0, 1 (a); 2.12 on rank 2 (b)")
    assert variable[:2] == ("NCCL_DEBUG", "not set on rank 0, 1 (a); WARN on rank 2 (b)")
    assert "every node" in version[2]


def test_the_engine_is_compared_with_plain_torch(tmp_path: Path) -> None:
    """In a process of its own: deepspeed keeps the groups of the first world that a process joins."""
    config = Path(__file__).parents[2] / "configs/quickstart.yaml"
    command = [sys.executable, "-m", "launch.cli", "doctor", str(config), "parallel.precision=bfloat16"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    said = " ".join(done.stdout.replace("│", " ").split())
    assert "engine ok a step of 1 ranks, ZeRO-1, bfloat16 is off from plain torch by" in said


def test_an_engine_that_is_off_or_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_engine, "engine_verdict", lambda *_: ("off by 0.3", doctor_engine.FIX))
    (finding,) = check_engine(RunConfig(device="cpu"))
    assert (finding.level, finding.fix) == ("fail", doctor_engine.FIX)

    def broken(*_: object) -> None:
        raise RuntimeError("an op was not built")

    monkeypatch.setattr(doctor_engine, "engine_verdict", broken)
    (finding,) = check_engine(RunConfig(device="cpu"))
    assert (finding.level, finding.found) == ("fail", "RuntimeError: an op was not built")
    assert not dist.is_initialized()


def test_ranks_of_several_leave_the_engine_to_when_they_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert list(check_engine(RunConfig())) == []
