"""Boundary states without their gradients: backpropagation that ends at the shard's edge."""

import torch
from torch import Tensor

from parallel.sequence.context import Exchange


class TruncatedExchange:
    """An `Exchange` whose forward messages are those of `exchange` and whose backward sends none.

    Every rank learns as if the states and tokens that came from the rank before were constants: what would be
    handed back is dropped, and what would arrive counts as zero.
    """

    def __init__(self, exchange: Exchange, device: torch.device) -> None:
        self._exchange = exchange
        self._device = device
        self.has_previous = exchange.has_previous
        self.has_next = exchange.has_next

    def send_next(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        self._exchange.send_next(name, tensors)

    def receive_previous(self, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self._exchange.receive_previous(name, like)

    def send_previous(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        pass

    def receive_next(self, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(tensor.shape, dtype=tensor.dtype, device=self._device) for tensor in like)
