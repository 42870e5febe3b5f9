"""Faults on demand, for tests and rehearsals: KVM_DIST_FAULT=NAME:RANK:STEP, several parted by commas."""

import logging
import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from kvm_dist.exit_codes import ConfigError
from kvm_dist.heartbeat import Heartbeat

VARIABLE = "KVM_DIST_FAULT"
FOLDER = "faults"  # in the run directory: a file for each fault that has struck, so that it strikes once
SLOW_SECONDS = 5.0
_FACTORS = {"nan": float("nan"), "spike": 50.0}  # of the logits
# name -> the phase of the step in which it strikes
PHASES = {
    "kill": "backward",  # SIGKILL of itself
    "stop": "forward",  # SIGSTOP of itself
    "loop": "data",  # waits for ever, and holds a core
    "silent": "reduce",  # never answers a collective
    "slow": "data",  # from this step on every step takes SLOW_SECONDS longer
    "crash": "forward",  # an error nobody expects
    "term": "forward",
    "usr2": "forward",
    "nan": "forward",  # logits that are no numbers
    "spike": "forward",  # logits far too large
}
_SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "term": signal.SIGTERM,
    "usr2": signal.SIGUSR2,
}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fault:
    """step: the optimizer step worked on, from 1, as in heartbeats."""

    name: str
    rank: int
    step: int

    def __str__(self) -> str:
        return f"{self.name}:{self.rank}:{self.step}"


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Raises ConfigError for a word that is no fault."""
    found = []
    for word in filter(None, text.split(",")):
        name, _, place = word.partition(":")
        rank, _, step = place.partition(":")
        if name not in PHASES or not rank.isdigit() or not step.isdigit():
            raise ConfigError(
                f"{VARIABLE}={text!r}: {word!r} is no fault; wanted NAME:RANK:STEP with a name of "
                f"{', '.join(PHASES)}, or unset {VARIABLE}"
            )
        found.append(Fault(name, int(rank), int(step)))
    return tuple(found)


def inject_faults(run_dir: Path, heartbeat: Heartbeat, model: nn.Module) -> None:
    """Have this rank's faults strike at their steps, each once in all attempts of the run."""
    mine = [fault for fault in parse_faults(os.environ.get(VARIABLE, "")) if fault.rank == heartbeat.rank]
    if not mine:
        return
    faults = _Faults(run_dir / FOLDER, mine, heartbeat)
    heartbeat.also = faults.strike
    model.register_forward_hook(faults.distort)
    _log.warning("%s: rank %d will meet %s", VARIABLE, heartbeat.rank, ", ".join(map(str, mine)))


class _Faults:
    """The faults of one rank."""

    def __init__(self, folder: Path, faults: Sequence[Fault], heartbeat: Heartbeat) -> None:
        self._folder, self._waiting, self._heartbeat = folder, list(faults), heartbeat
        self._factor = 1.0
        self._slow = False

    def strike(self, phase: str) -> None:
        """Told of every phase as it begins."""
        if phase == "backward":
            self._factor = 1.0
        for fault in self._due(phase):
            self._waiting.remove(fault)
            if self._claim(fault):
                self._do(fault)
        if self._slow and phase == PHASES["slow"]:
            time.sleep(SLOW_SECONDS)

    def distort(self, module: nn.Module, inputs: object, logits: Tensor) -> Tensor:
        """A forward hook of the model."""
        return logits if self._factor == 1.0 else logits * self._factor

    def _due(self, phase: str) -> Iterable[Fault]:
        step = self._heartbeat.step
        return [fault for fault in self._waiting if fault.step == step and PHASES[fault.name] == phase]

    def _claim(self, fault: Fault) -> bool:
        self._folder.mkdir(0o750, exist_ok=True)
        try:
            path = self._folder / str(fault).replace(":", "-")
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o640))
        except FileExistsError:
            return False
        return True

    def _do(self, fault: Fault) -> None:
        _log.warning("fault %s strikes", fault)
        if fault.name in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[fault.name])
        elif fault.name in _FACTORS:
            self._factor = _FACTORS[fault.name]
        elif fault.name == "crash":
            raise RuntimeError(f"fault {fault}")
        elif fault.name == "slow":
            self._slow = True
        else:
            _wait_for_ever(busy=fault.name == "loop")


def _wait_for_ever(busy: bool) -> None:
    while True:
        if not busy:
            time.sleep(60)
