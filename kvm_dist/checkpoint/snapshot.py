"""A rank's own copy of what it answers for: training goes on while the copy is written."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvm_dist.checkpoint.layout import FileLayout, TensorSpec, lay_out
from kvm_dist.checkpoint.parts import Piece
from parallel.engine.deepspeed import OwnedTensors

TakenTensors = Sequence[tuple[OwnedTensors, dict[str, Tensor]]]


class Snapshot:
    """One buffer on the host, made at the first copy and used again: a new one costs more than the copy."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def take(self, owned: Sequence[OwnedTensors]) -> TakenTensors:
        """Copies all views. The copies stand until the next `take`."""
        views = [view for tensors in owned for view in tensors.views.values()]
        total = sum(view.numel() for view in views)
        on_gpu = any(view.is_cuda for view in views)
        if self._buffer.numel() != total:
            self._buffer = torch.empty(0)  # two of them would need twice the memory
            self._buffer = torch.empty(total, dtype=torch.float32, pin_memory=on_gpu)
        copies = iter(self._buffer.split([view.numel() for view in views]))
        taken = [(tensors, {kind: next(copies) for kind in tensors.views}) for tensors in owned]
        for tensors, copied in taken:
            for kind, view in tensors.views.items():
                copied[kind].copy_(view, non_blocking=True)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return taken


def tensor_layouts(owned: Sequence[OwnedTensors], part_bytes: int) -> list[FileLayout]:
    """Weights under their own name, everything else as KIND.NAME beside them.

    A master is left out where the weight has its dtype.
    """
    weights, rest = [], []
    for tensors in owned:
        weights.append(TensorSpec(tensors.name, tensors.dtype, tensors.shape))
        kinds = ["exp_avg", "exp_avg_sq"]
        if tensors.dtype != torch.float32:
            kinds.insert(0, "master")
        rest += [TensorSpec(f"{kind}.{tensors.name}", torch.float32, tensors.shape) for kind in kinds]
        rest.append(TensorSpec(f"step.{tensors.name}", torch.float32, ()))
    return lay_out("model", weights, part_bytes) + lay_out("optimizer", rest, part_bytes)


def owned_pieces(taken: TakenTensors) -> Iterator[Piece]:
    """The copies as parts of the files of `tensor_layouts`. Rounds weights as the engine does."""
    for tensors, copied in taken:
        for kind, elements in copied.items():
            if kind != "master" or tensors.dtype != torch.float32:
                yield Piece(f"{kind}.{tensors.name}", tensors.start, elements)
            if kind == "master":
                yield Piece(tensors.name, tensors.start, elements.to(tensors.dtype))


def step_pieces(owned: Sequence[OwnedTensors], step: float) -> Iterator[Piece]:
    for tensors in owned:
        yield Piece(f"step.{tensors.name}", 0, torch.tensor([step], dtype=torch.float32))
