"""A rank's own copy of what it answers for: training goes on while the copy is written."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvm_dist.checkpoint.layout import FileLayout, TensorSpec, lay_out, part_size
from kvm_dist.checkpoint.parts import Piece
from parallel.engine.deepspeed import OwnedTensors

TakenTensors = Sequence[tuple[OwnedTensors, dict[str, Tensor]]]


class Snapshot:
    """One buffer on the host, made once and used again: a new one costs more than the copy."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def reserve(self, owned: Sequence[OwnedTensors]) -> None:
        """Makes the buffer and touches it, so that the first save need not."""
        views = _views(owned)
        total = sum(view.numel() for view in views)
        if self._buffer.numel() != total:
            self._buffer = torch.empty(0)  # two of them would need twice the memory
            self._buffer = torch.zeros(
                total, dtype=torch.float32, pin_memory=any(view.is_cuda for view in views)
            )
            self._buffer.fill_(0)  # zeros alone are memory that the system has yet to give

    def take(self, owned: Sequence[OwnedTensors]) -> TakenTensors:
        """Copies all views. The copies stand until the next `take`."""
        self.reserve(owned)
        views = sorted(_views(owned), key=Tensor.data_ptr)
        runs = list(_runs(views))
        for source, target in zip(runs, self._parts(runs), strict=True):
            target.copy_(source, non_blocking=True)
        if any(view.is_cuda for view in views):
            torch.cuda.current_stream().synchronize()
        copies = {id(view): copy for view, copy in zip(views, self._parts(views), strict=True)}
        return [
            (tensors, {kind: copies[id(view)] for kind, view in tensors.views.items()}) for tensors in owned
        ]

    def _parts(self, views: Sequence[Tensor]) -> Iterator[Tensor]:
        """The buffer, cut as long as `views` are."""
        end = 0
        for view in views:
            begin, end = end, end + view.numel()
            yield self._buffer[begin:end]


def _views(owned: Sequence[OwnedTensors]) -> list[Tensor]:
    return [view for tensors in owned for view in tensors.views.values()]


def _runs(views: Sequence[Tensor]) -> Iterator[Tensor]:
    """The same elements in fewer views: those that lie side by side in one storage are made one."""
    run: list[Tensor] = []
    for view in views:
        if run and not _follows(view, run[-1]):
            yield _joined(run)
            run = []
        run.append(view)
    if run:
        yield _joined(run)


def _follows(view: Tensor, last: Tensor) -> bool:
    one_storage = view.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    return one_storage and view.storage_offset() == last.storage_offset() + last.numel()


def _joined(run: Sequence[Tensor]) -> Tensor:
    return run[0].as_strided((sum(view.numel() for view in run),), (1,))


def tensor_layouts(owned: Sequence[OwnedTensors]) -> list[FileLayout]:
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
    size = part_size(sum(spec.bytes for spec in weights + rest))
    return lay_out("model", weights, size) + lay_out("optimizer", rest, size)


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
