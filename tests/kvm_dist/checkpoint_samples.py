"""Small checkpoints for the tests. As a program: each step read starts a process that saves without end."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from kvm_dist.checkpoint import CheckpointInfo, prune
from kvm_dist.checkpoint.rng import capture_rng
from kvm_dist.checkpoint.save import save_checkpoint

CONFIG_TEXT = "name: sample\n"


def sample_tensors(step: int, count: int = 6, width: int = 96) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """bfloat16 and float32 parameters whose every element tells the step."""
    for index in range(count):
        master = torch.arange(width * (index + 1), dtype=torch.float32).reshape(index + 1, width) + step
        weight = master.to(torch.bfloat16 if index % 2 else torch.float32)
        yield (
            f"layers.{index}.weight",
            {
                "weight": weight,
                "master": master,
                "exp_avg": -master,
                "exp_avg_sq": master * master,
                "step": torch.tensor([float(step)]),
            },
        )


def save_sample(checkpoints: Path, step: int, part_bytes: int = 2048) -> CheckpointInfo:
    info = save_checkpoint(
        checkpoints,
        step,
        sample_tensors(step),
        rng_states=[capture_rng(torch.device("cpu"))] * 2,
        state={"position": 3 * step, "counters": {"skipped_steps": 0}},
        config_text=CONFIG_TEXT,
        part_bytes=part_bytes,
    )
    assert info is not None, "rank 0 gets what it saved"
    return info


def save_without_end(checkpoints: Path, step: int) -> None:
    while True:
        saved = save_sample(checkpoints, step)
        prune(checkpoints, keep=2, verified=saved.path)
        step += 1


if __name__ == "__main__":
    for line in sys.stdin:
        saver = os.fork()
        if saver == 0:
            save_without_end(Path(sys.argv[1]), int(line))
        print(saver, flush=True)
        _, status = os.waitpid(saver, 0)
        print("killed" if os.WIFSIGNALED(status) else "failed", flush=True)
