"""How much autograd keeps for a backward: every storage that a saved tensor keeps alive, once."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SavedBytes:
    """What was saved while it was open, in this thread, but for tensors in `outside` and views of them."""

    def __init__(self, outside: Iterable[Tensor]) -> None:
        self._outside = {tensor.untyped_storage().data_ptr() for tensor in outside}
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept, so that no address is used twice

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._outside:
            self._storages[storage.data_ptr()] = storage
        return tensor

    @property
    def total(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())


@contextmanager
def saved_bytes(outside: Iterable[Tensor] = ()) -> Iterator[SavedBytes]:
    saved = SavedBytes(outside)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        yield saved
