"""What is read of a node, with and without the tools of GPU vendors, and the process that reads it."""

import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvm_dist import system_metrics
from kvm_dist.metrics import read_metrics
from kvm_dist.system_metrics import NodeMetrics, all_readers, last_step, node_name, sampled
from kvm_dist.system_metrics_gpu import gpu_reader

PATIENCE_SECONDS = 120.0


def constant() -> Mapping[str, float]:
    return {"cpu_utilization_percentage": 12.3456}


def no_answer() -> Mapping[str, float]:
    raise RuntimeError("the driver is gone")


def test_this_machine_tells_of_processor_memory_disk_and_network(tmp_path: Path) -> None:
    NodeMetrics(tmp_path, "node1", all_readers(tmp_path)).sample()
    (values,) = read_metrics(tmp_path / "system_metrics/node1.jsonl")
    for name in ("cpu_utilization", "system_memory_usage", "disk_usage"):
        assert 0 <= values[f"system/node1/{name}_percentage"] <= 100
    assert values["system/node1/system_memory_usage_megabytes"] > 1
    assert values["system/node1/network_receive_megabytes"] >= 0


def test_what_cannot_be_read_is_left_out_and_lines_are_numbered_on(tmp_path: Path) -> None:
    for _ in range(2):
        node = NodeMetrics(tmp_path, "node1", [no_answer, constant])
        node.sample()
        node.sample()
    found = read_metrics(node.path)
    assert [values["step"] for values in found] == [1, 2, 3, 4]
    assert found[0]["system/node1/cpu_utilization_percentage"] == 12.346
    assert (tmp_path / "system_metrics").stat().st_mode & 0o777 == 0o750


def test_a_run_directory_that_is_away_costs_samples_only(tmp_path: Path) -> None:
    node = NodeMetrics(tmp_path / "absent", "node1", [constant])
    node.sample()
    (tmp_path / "absent").mkdir()
    node.sample()
    assert [values["step"] for values in read_metrics(node.path)] == [2]


def test_a_file_that_has_grown_too_large_loses_its_older_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system_metrics, "LARGEST_BYTES", 1000)
    node = NodeMetrics(tmp_path, "node1", [constant])
    for _ in range(60):
        node.sample()
        assert node.path.stat().st_size <= 1000
    steps = [values["step"] for values in read_metrics(node.path)]
    assert steps == list(range(int(steps[0]), 61))
    assert last_step(node.path) == 60


@pytest.mark.parametrize(
    ("environment", "name"),
    [({"SLURMD_NODENAME": "node2"}, "node2"), ({"SLURMD_NODENAME": "a/../b.cluster"}, "a")],
)
def test_a_node_is_called_as_slurm_does_and_never_a_path(environment: dict[str, str], name: str) -> None:
    assert node_name(environment) == name
    assert node_name({})


class Nvidia(SimpleNamespace):
    """What `pynvml` answers for two devices, the second of which knows no power."""

    def __init__(self) -> None:
        memory = SimpleNamespace(used=40e9, total=80e9)
        super().__init__(
            nvmlInit=lambda: None,
            nvmlDeviceGetCount=lambda: 2,
            nvmlDeviceGetHandleByIndex=lambda number: number,
            nvmlDeviceGetMemoryInfo=lambda handle: memory,
            nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=90 + handle),
            nvmlDeviceGetPowerUsage=self.power,
            nvmlDeviceGetEnforcedPowerLimit=lambda handle: 700_000,
        )

    @staticmethod
    def power(handle: int) -> int:
        if handle == 1:
            raise RuntimeError("not supported")
        return 350_000


def amd(power: Mapping[str, Any]) -> SimpleNamespace:
    """What `amdsmi` answers for one device."""
    return SimpleNamespace(
        amdsmi_init=lambda: None,
        amdsmi_get_processor_handles=lambda: [object()],
        amdsmi_get_gpu_vram_usage=lambda handle: {"vram_used": 65536, "vram_total": 262144},
        amdsmi_get_gpu_activity=lambda handle: {"gfx_activity": "N/A"},
        amdsmi_get_power_info=lambda handle: power,
        amdsmi_get_power_cap_info=lambda handle: {"power_cap": 1_000_000_000},
    )


@pytest.fixture(autouse=True)
def without_gpu_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pynvml", "amdsmi"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails


def test_without_a_vendors_package_there_is_no_reader() -> None:
    assert gpu_reader() is None


def test_a_package_without_a_device_is_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Nvidia()
    module.nvmlDeviceGetCount = lambda: 0
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert gpu_reader() is None


def test_nvidia_gpus_are_read_and_what_one_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvidia())
    read = gpu_reader()
    assert read is not None
    assert read() == {
        "gpu_0_memory_usage_megabytes": 40_000,
        "gpu_0_memory_usage_percentage": 50,
        "gpu_0_utilization_percentage": 90,
        "gpu_0_power_usage_watts": 350,
        "gpu_0_power_usage_percentage": 50,
        "gpu_1_memory_usage_megabytes": 40_000,
        "gpu_1_memory_usage_percentage": 50,
        "gpu_1_utilization_percentage": 91,
    }


@pytest.mark.parametrize(
    "power",
    [
        {"current_socket_power": 400, "average_socket_power": "N/A"},
        {"current_socket_power": "N/A", "average_socket_power": 400},
        {"current_socket_power": 0, "socket_power": 400},
    ],
)
def test_amd_gpus_are_read_whichever_field_their_power_is_in(
    monkeypatch: pytest.MonkeyPatch, power: dict[str, Any]
) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", amd(power))
    read = gpu_reader()
    assert read is not None
    assert read() == {
        "gpu_0_memory_usage_megabytes": 65536 * 2**20 / 1e6,
        "gpu_0_memory_usage_percentage": 25,
        "gpu_0_power_usage_watts": 400,
        "gpu_0_power_usage_percentage": 40,
    }


def test_a_process_samples_as_long_as_it_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def recorded(*command: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*command, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", recorded)
    path = tmp_path / "system_metrics/node1.jsonl"
    with sampled(tmp_path, 0.001):
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not path.exists():
            assert time.monotonic() < deadline, "nothing was sampled"
            time.sleep(0.1)
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_a_process_ends_by_itself_once_its_rank_is_gone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvm_dist.system_metrics", str(tmp_path)]
    command += ["--parent", "0", "--seconds", "1"]
    assert subprocess.run(command, timeout=PATIENCE_SECONDS, check=False).returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_no_seconds_mean_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("nothing may be started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with sampled(tmp_path, 0):
        pass


def test_a_machine_that_starts_no_process_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with sampled(tmp_path, 1.0):
        pass
