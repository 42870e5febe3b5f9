"""Small checkpoints for the tests. As a program: each step read starts a process that saves without end."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Thread

import torch
from torch import Tensor

from kvm_dist.checkpoint import CheckpointInfo, prune
from kvm_dist.checkpoint.layout import TensorSpec, lay_out
from kvm_dist.checkpoint.parts import Piece, write_share
from kvm_dist.checkpoint.rng import capture_rng, rng_contents
from kvm_dist.checkpoint.save import begin_save, finish_save, state_text

KINDS = ("master", "exp_avg", "exp_avg_sq", "step")
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


def save_sample(checkpoints: Path, step: int, part_bytes: int = 2048, ranks: int = 2) -> CheckpointInfo:
    """As `ranks` ranks save, each writing its part beside the others."""
    tensors = [
        (f"{kind}.{name}" if kind != "weight" else name, tensor) for name, kind, tensor in _stored(step)
    ]
    return save_tensors(
        checkpoints,
        step,
        dict(tensors),
        rng_states=[capture_rng(torch.device("cpu"))] * 2,
        state={"position": 3 * step, "counters": {"skipped_steps": 0}},
        part_bytes=part_bytes,
        ranks=ranks,
    )


def save_tensors(
    checkpoints: Path,
    step: int,
    tensors: dict[str, Tensor],
    rng_states: Sequence[Mapping[str, Tensor]] = (),
    state: Mapping[str, object] | None = None,
    part_bytes: int = 1 << 30,
    ranks: int = 1,
    config_text: str = CONFIG_TEXT,
) -> CheckpointInfo:
    """Tensors by key: those of the optimizer begin with their kind."""
    specs, rng_pieces = rng_contents(rng_states)
    layouts = lay_out("rng", specs, 1 << 30)
    for stem in ("model", "optimizer"):
        kept = [
            (key, value)
            for key, value in tensors.items()
            if (key.split(".")[0] in KINDS) == (stem != "model")
        ]
        layouts += lay_out(stem, [TensorSpec(key, t.dtype, tuple(t.shape)) for key, t in kept], part_bytes)
    texts = {"state.json": state_text(state or {}, step), "config.yaml": config_text}
    draft = begin_save(checkpoints, step, layouts, texts)
    writers = []
    for rank in range(ranks):
        pieces = [piece_of(key, tensor, rank, ranks) for key, tensor in tensors.items()]
        pieces += rng_pieces if rank == 0 else []
        writers.append(Thread(target=write_share, args=(draft.partial, layouts, pieces, rank), daemon=True))
        writers[-1].start()
    saved = finish_save(draft, ranks)
    for writer in writers:
        writer.join()
    return saved


def piece_of(key: str, tensor: Tensor, rank: int, ranks: int) -> Piece:
    begin, end = (tensor.numel() * edge // ranks for edge in (rank, rank + 1))
    return Piece(key, begin, tensor.reshape(-1)[begin:end])


def _stored(step: int) -> Iterator[tuple[str, str, Tensor]]:
    """What of a parameter is stored: no master where the weight has its dtype."""
    for name, kinds in sample_tensors(step):
        for kind, tensor in kinds.items():
            if kind != "master" or kinds["weight"].dtype != tensor.dtype:
                yield name, kind, tensor


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
