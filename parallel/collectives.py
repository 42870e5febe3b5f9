"""What all ranks decide together. With one rank, or before any group exists, nothing is sent."""

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None
T = TypeVar("T")


def size(group: Group = None) -> int:
    """Ranks of the group; of the world when None."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def sum(tensor: Tensor, group: Group = None) -> Tensor:
    """The sum over ranks, a new tensor like the one given."""
    return _reduced(tensor, dist.ReduceOp.SUM, group)


def mean(tensor: Tensor, group: Group = None) -> Tensor:
    """The mean over ranks of a floating-point tensor, a new tensor."""
    return _reduced(tensor, dist.ReduceOp.SUM, group) / size(group)


def maximum(tensor: Tensor, group: Group = None) -> Tensor:
    """The largest value over ranks, elementwise, a new tensor."""
    return _reduced(tensor, dist.ReduceOp.MAX, group)


def any_rank(flag: bool, group: Group = None) -> bool:
    """Whether the flag is set on any rank; the same answer on all."""
    if size(group) == 1:
        return flag
    return bool(maximum(torch.tensor(int(flag), device=_device(group)), group))


def broadcast_object(value: T, source: int = 0, group: Group = None) -> T:
    """The value of rank `source` of the group, on every rank."""
    if size(group) == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, group=group, group_src=source, device=_device(group))
    return box[0]


def broadcast(tensor: Tensor, source: int = 0, group: Group = None) -> Tensor:
    """The tensor of rank `source` of the group, on every rank; shapes and dtypes agree. The one given may be
    written over where it is not the source's."""
    if size(group) == 1:
        return tensor.detach()
    sent = tensor.detach().contiguous().to(_device(group))
    dist.broadcast(sent, group=group, group_src=source)
    return sent.to(tensor.device)


def gather_objects(value: T, group: Group = None) -> list[T]:
    """Every rank's value in rank order, on every rank."""
    if size(group) == 1:
        return [value]
    gathered: list[Any] = [None] * size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def barrier(group: Group = None) -> None:
    """Return when all ranks have come here."""
    any_rank(False, group)


def _reduced(tensor: Tensor, operation: dist.ReduceOp.RedOpType, group: Group) -> Tensor:
    reduced = tensor.detach().clone()
    if size(group) > 1:
        dist.all_reduce(reduced, operation, group=group)
        _wait_for(reduced)
    return reduced


def _wait_for(tensor: Tensor) -> None:
    """On a GPU too the host waits for other ranks here, and not where it reads the numbers: whoever looks at
    the stacks of a hang, or at a clock, sees what it waits for."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def _device(group: Group) -> torch.device:
    backend = dist.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
