"""Use, memory and power of the GPUs of a node, where the vendor's Python package is installed.

NVIDIA: nvidia-ml-py (`pynvml`). AMD: `amdsmi`, which ROCm brings along. Neither is a requirement.
"""

import contextlib
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

Reader = Callable[[], Mapping[str, float]]
Values = dict[str, Callable[[], float]]
_AMD_POWER = (
    "current_socket_power",
    "average_socket_power",
    "socket_power",
)


def gpu_reader() -> Reader | None:
    """A function that reads all GPUs of this node; None where there are none or no package to ask."""
    for find in (_nvidia, _amd):
        with contextlib.suppress(Exception):  # no package, no driver, no device: each has its own error
            devices = find()
            if devices:
                return _reader(devices)
    return None


def _nvidia() -> list[Values]:
    nvml = import_module("pynvml")
    nvml.nvmlInit()
    handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    return [nvidia_values(nvml, handle) for handle in handles]


def _amd() -> list[Values]:
    smi = import_module("amdsmi")
    smi.amdsmi_init()
    return [amd_values(smi, handle) for handle in smi.amdsmi_get_processor_handles()]


def _reader(devices: list[Values]) -> Reader:
    def read() -> dict[str, float]:
        found: dict[str, float] = {}
        for number, values in enumerate(devices):
            for name, value in values.items():
                with contextlib.suppress(Exception):  # what a device does not tell is left out
                    found[f"gpu_{number}_{name}"] = float(value())
        return found

    return read


def nvidia_values(nvml: Any, handle: Any) -> Values:
    """By name, how to ask one GPU. nvml: the module `pynvml`."""

    def memory() -> Any:
        return nvml.nvmlDeviceGetMemoryInfo(handle)

    def milliwatts() -> float:
        return float(nvml.nvmlDeviceGetPowerUsage(handle))

    return {
        "memory_usage_megabytes": lambda: memory().used / 1e6,
        "memory_usage_percentage": lambda: memory().used / memory().total * 100,
        "utilization_percentage": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "power_usage_watts": lambda: milliwatts() / 1000,
        "power_usage_percentage": lambda: milliwatts() / nvml.nvmlDeviceGetEnforcedPowerLimit(handle) * 100,
    }


def amd_values(smi: Any, handle: Any) -> Values:
    """By name, how to ask one GPU. smi: the module `amdsmi`, which says "N/A" where it does not know."""

    def memory() -> Any:  # in MiB
        return smi.amdsmi_get_gpu_vram_usage(handle)

    def watts() -> float:  # in the field that its generation fills
        power = smi.amdsmi_get_power_info(handle)
        return float(next(power[name] for name in _AMD_POWER if power.get(name) not in (None, 0, "N/A")))

    def most_watts() -> float:
        return float(smi.amdsmi_get_power_cap_info(handle)["power_cap"]) / 1e6

    return {
        "memory_usage_megabytes": lambda: memory()["vram_used"] * 2**20 / 1e6,
        "memory_usage_percentage": lambda: memory()["vram_used"] / memory()["vram_total"] * 100,
        "utilization_percentage": lambda: smi.amdsmi_get_gpu_activity(handle)["gfx_activity"],
        "power_usage_watts": watts,
        "power_usage_percentage": lambda: watts() / most_watts() * 100,
    }
