"""What a rank does before it waits for another: all that needs nobody."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from models.kvm import advance, attend, gradients
from tests.models.kvm.cases import random_case
from tests.support.logical_ranks import QueueExchange, run_logical_ranks

SHARD = 16
RANKS = 4
WATCHED = {
    "attention": (attend, "softmax_part"),
    "attention backward": (gradients, "softmax_part_backward"),
    "routing": (advance, "first_maximum"),
}


def events_of_a_step(window_chunks: int) -> list[tuple[list[str], list[str]]]:
    """Of every rank, what it did in the forward and in the backward, in order; waits by their message."""
    case = random_case(SHARD * RANKS, window_chunks=window_chunks)
    done: dict[int, list[str]] = {}

    def watched(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **more: Any) -> Any:
            done[threading.get_ident()].append(what)
            return function(*args, **more)

        return called

    class Watched(QueueExchange):
        def _receive(self, name: str, like: tuple[Tensor, ...], queue: Any) -> tuple[Tensor, ...]:
            done[threading.get_ident()].append(name)
            return super()._receive(name, like, queue)

    def one(rank: int, exchange: QueueExchange) -> tuple[list[str], list[str]]:
        exchange.__class__ = Watched
        start = rank * SHARD
        forward = done[threading.get_ident()] = []
        output, _ = case.call(case.leaves(start, start + SHARD), exchange=exchange, start=start)
        backward = done[threading.get_ident()] = []
        output.backward(case.grad_output[:, start : start + SHARD])
        return forward, backward

    with ExitStack() as stack:
        for what, (module, name) in WATCHED.items():
            stack.enter_context(patch.object(module, name, watched(what, getattr(module, name))))
        return run_logical_ranks(RANKS, one)


@pytest.mark.parametrize("window_chunks", [1, 3])
def test_nobody_waits_with_attention_or_routing_undone(window_chunks: int) -> None:
    for rank, (forward, backward) in enumerate(events_of_a_step(window_chunks)):
        assert "routing" not in backward
        assert "attention backward" in backward
        if rank < RANKS - 1:  # the last rank routes as it reads: nobody waits for it
            assert set(forward[forward.index("attention") :]) == {"attention"}
            first_wait = min(index for index, one in enumerate(backward) if one.startswith("kvm."))
            assert "attention backward" not in backward[first_wait:]
