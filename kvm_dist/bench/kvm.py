"""`bench kvm`: KVM against full attention on this machine, in one run."""

import os
import platform
import time
from collections.abc import Callable
from typing import Any

import torch

from kvm_dist.bench.contenders import pieces_error, time_decoding, time_training, warm_up
from kvm_dist.bench.memory import peak_bytes
from kvm_dist.bench.results import Results
from kvm_dist.bench.setting import BUDGETS, FULL_ATTENTION, Setting
from parallel.allocator import keep_freed_memory

# A guess of seconds per pair of tokens for the share of each step in the whole; only for the time left.
_SECONDS_PER_PAIR = 2e-8

Report = Callable[[str, float], None]  # what is being done, and the share of the whole that is done


def bench_kvm(setting: Setting, report: Report = lambda *_: None) -> Results:
    """Measures everything; `report` hears of every turn."""
    threads = torch.get_num_threads()
    torch.set_num_threads(setting.threads)
    keep_freed_memory()  # as training does
    try:
        return _bench(setting, _Done(_expected_seconds(setting), report))
    finally:
        torch.set_num_threads(threads)


def _bench(setting: Setting, done: "_Done") -> Results:
    results = Results(setting, _machine(setting))
    warm_up(setting)
    for tokens in sorted(setting.lengths):
        results.timings += time_training(setting, tokens, done.turns(tokens))
    for decoding in time_decoding(setting):
        results.decodings.append(decoding)
        done.add(f"decode: {decoding.contender}", _full_seconds(setting.decode_context) / 8)
    for contender in (*BUDGETS, FULL_ATTENTION):
        results.peak_bytes[contender] = peak_bytes(setting, contender)
        done.add(f"memory: {contender}", _full_seconds(setting.memory_length) / 2)
    results.pieces_error = pieces_error(setting, min(setting.lengths))
    results.machine["load_average_end"] = os.getloadavg()[0]
    done.add("prefill in pieces", _full_seconds(min(setting.lengths)))
    return results


class _Done:
    def __init__(self, expected: float, report: Report) -> None:
        self._expected = expected
        self._report = report
        self._seconds = 0.0

    def turns(self, tokens: int) -> Callable[[str], None]:
        """Told of every turn at one length."""
        expected = _full_seconds(tokens)

        def turn(contender: str) -> None:
            share = 1.0 if contender == FULL_ATTENTION else 0.25
            self.add(f"{tokens:,} tokens: {contender}", share * expected)

        return turn

    def add(self, what: str, seconds: float) -> None:
        self._seconds += seconds
        self._report(what, min(self._seconds / self._expected, 1.0))


def _full_seconds(tokens: int) -> float:
    return _SECONDS_PER_PAIR * tokens**2 + 0.5


def _expected_seconds(setting: Setting) -> float:
    expected = _full_seconds(min(setting.lengths))
    for tokens in setting.lengths:
        others = len(setting.contenders(tokens)) - 1
        expected += setting.rounds(tokens) * _full_seconds(tokens) * (1 + others / 4)
    steps = len(BUDGETS) + 1
    return (
        expected
        + steps * _full_seconds(setting.decode_context) / 8
        + steps * _full_seconds(setting.memory_length) / 2
    )


def _machine(setting: Setting) -> dict[str, Any]:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "threads": setting.threads,
        "load_average_start": os.getloadavg()[0],
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
