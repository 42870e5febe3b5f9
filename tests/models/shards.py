"""Shards of one sequence on threads of this process: each with its own copy of a model, real messages."""

import copy
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from models.backbone import Backbone
from models.loss import token_losses
from parallel.mesh import Mesh
from parallel.sequence.ranks import RankedSequence

Message = tuple[str, tuple[Tensor, ...]]
TIMEOUT_SECONDS = 60


class QueueExchange:
    """The `Exchange` of neighbours that share a process; keeps a record of what was sent."""

    def __init__(self, rank: int, edges: list[tuple["Queue[Message]", "Queue[Message]"]]) -> None:
        self.has_previous = rank > 0
        self.has_next = rank < len(edges)
        self._before = edges[rank - 1] if self.has_previous else None
        self._after = edges[rank] if self.has_next else None
        self.sent: list[tuple[str, int]] = []

    def send_next(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        assert self._after is not None
        self._send(self._after[0], name, tensors)

    def receive_previous(self, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert self._before is not None
        return self._receive(self._before[0], name, like)

    def send_previous(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        assert self._before is not None
        self._send(self._before[1], name, tensors)

    def receive_next(self, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert self._after is not None
        return self._receive(self._after[1], name, like)

    def _send(self, queue: "Queue[Message]", name: str, tensors: tuple[Tensor, ...]) -> None:
        self.sent.append((name, sum(z.numel() * z.element_size() for z in tensors)))
        queue.put((name, tuple(z.detach().clone() for z in tensors)))

    def _receive(self, queue: "Queue[Message]", name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        arrived, tensors = queue.get(timeout=TIMEOUT_SECONDS)
        assert arrived == name
        assert [(z.shape, z.dtype) for z in tensors] == [(z.shape, z.dtype) for z in like]
        return tensors


def run_on_shards(
    model: Backbone, input_ids: Tensor, labels: Tensor, cuts: list[int]
) -> tuple[Tensor, Any, Any]:
    """Logits of the whole sequence, gradient of the summed loss by parameter, and what each shard sent."""
    edges: list[tuple[Queue[Message], Queue[Message]]] = [(Queue(), Queue()) for _ in cuts]
    bounds = [0, *cuts, input_ids.shape[1]]

    def one(rank: int) -> tuple[Tensor, nn.Module, list[tuple[str, int]]]:
        part = slice(bounds[rank], bounds[rank + 1])
        exchange, own = QueueExchange(rank, edges), copy.deepcopy(model)
        mesh = cast(Mesh, SimpleNamespace(sequence_rank=rank))
        logits = own(input_ids[:, part], RankedSequence(mesh, bounds[rank], exchange))
        token_losses(logits, labels[:, part])[0].backward()
        return logits.detach(), own, exchange.sent

    with ThreadPoolExecutor(len(cuts) + 1) as pool:
        results = list(pool.map(one, range(len(cuts) + 1)))
    logits = torch.cat([result[0] for result in results], dim=1)
    parameters = [dict(result[1].named_parameters()) for result in results]
    gradients = {name: [p[name].grad for p in parameters] for name in parameters[0]}
    return logits, gradients, [result[2] for result in results]
