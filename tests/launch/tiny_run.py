"""A training run small enough for tests, started as a person starts it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from safetensors.torch import load_file

STEPS = 12
CONFIG = f"""
name: tiny
run_root: {{root}}/runs
seed: 3
data: {{{{path: {{corpus}}/prepared, source: {{corpus}}/text, sequence_length: 121}}}}
model:
  hidden_size: 32
  num_layers: 3
  num_heads: 2
  layers: [kvm, rwkv7, sliding_window]
  base_width: 32
  kvm: {{{{chunk: 16, budget: {{{{kind: power_law, factor: 3, minimum: 16}}}}}}}}
  rwkv7: {{{{head_dim: 16}}}}
  sliding_window: {{{{window: 16}}}}
optimizer: {{{{learning_rate: 5e-3}}}}
schedule: {{{{warmup_steps: 2}}}}
train: {{{{steps: {STEPS}, batch_sequences: 4}}}}
parallel: {{{{sequence: 2, timeout_seconds: 60, threads_per_rank: 1}}}}
checkpoint: {{{{every_steps: 3, keep: 2}}}}
evaluation: {{{{every_steps: 6, validation_sequences: 3, sample_prompts: ["the "], sample_tokens: 4}}}}
tracking: {{{{enabled: false}}}}
"""


def write_corpus(folder: Path) -> None:
    (folder / "text").mkdir()
    for number in range(8):
        lines = (f"line {n * number % 17} of file {number}: the {n % 7} and the {n % 5}\n" for n in range(60))
        (folder / "text" / f"{number}.txt").write_text("".join(lines))


class TinyRun:
    """A run directory under `root`; `start` and `train` are the same command each time."""

    def __init__(self, root: Path, corpus: Path) -> None:
        self.root = root
        self.directory = root / "runs" / "tiny"
        self.config = root / "tiny.yaml"
        root.mkdir(exist_ok=True)
        self.config.write_text(CONFIG.format(root=root, corpus=corpus))

    def start(self, overrides: Sequence[str] = ()) -> "subprocess.Popen[str]":
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        return subprocess.Popen(
            [sys.executable, "-m", "launch.cli", "train", str(self.config), *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment | {"OMP_NUM_THREADS": "1"},
        )

    def train(self, overrides: Sequence[str] = (), code: int = 0) -> str:
        """Train to the end; the output."""
        process = self.start(overrides)
        output, _ = process.communicate(timeout=500)
        assert process.returncode == code, output
        return output

    def signal_at(
        self, step: int, number: int, target: str, overrides: Sequence[str] = ()
    ) -> tuple[int, str]:
        """Send a signal once `step` steps are logged, to `launcher` or `rank N`; exit code and output."""
        process = self.start(overrides)
        deadline = time.monotonic() + 300
        while self.last_step() < step:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, f"step {step} did not come"
            time.sleep(0.01)
        os.kill(process.pid if target == "launcher" else rank_pid(process.pid, int(target[5:])), number)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def last_step(self) -> int:
        metrics = self.metrics()
        return int(metrics[-1]["step"]) if metrics else 0

    def metrics(self) -> list[dict[str, float]]:
        path = self.directory / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def losses(self) -> dict[int, float]:
        return {int(line["step"]): line["train/loss"] for line in self.metrics()}

    def final_bytes(self) -> dict[str, str]:
        """A hash of every tensor of the newest checkpoint: pytest compares whole bytes for minutes."""
        folder = max(path.parent for path in (self.directory / "checkpoints").glob("step-*/manifest.json"))
        tensors = load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")
        return {name: sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}


def rank_pid(launcher: int, rank: int) -> int:
    """The process of a rank, found among the launcher's children by its environment."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == launcher and f"RANK={rank}".encode() in environment:
            return int(entry.name)
    raise AssertionError(f"rank {rank} of launcher {launcher} is not running")


SIGKILL, SIGTERM, SIGUSR2 = signal.SIGKILL, signal.SIGTERM, signal.SIGUSR2
