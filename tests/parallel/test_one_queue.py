"""Ranks never wait for each other in a circle, even where a GPU runs nothing beside a message that waits.

NCCL and RCCL promise no more: kernels of two streams may run one after the other.
"""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from models.loss import token_losses
from models.prefill import prefill
from parallel.config import NodeSplits
from parallel.mesh import Mesh
from parallel.sequence.context import HeadSplit
from parallel.sequence.ranks import RankedSequence
from parallel.sequence.truncated import TruncatedExchange
from tests.models.kvm.cases import random_case
from tests.models.kvm.test_nodes import run_nodes
from tests.models.kvm.test_ranks import run_shards
from tests.models.tiny import HYBRID, RECURRENCES, tiny_batch, tiny_model
from tests.parallel.test_alternation import run_in_turns
from tests.support.logical_all_to_all import LogicalRow
from tests.support.logical_ranks import QueueExchange, run_logical_ranks
from tests.support.one_queue import one_queue

LAYERS = [*HYBRID, "block_window", "ovq", "full_attention"]
CUTS = [0, 64, 96, 128, 160]


@pytest.fixture(autouse=True)
def queue(monkeypatch: pytest.MonkeyPatch) -> None:
    one_queue(monkeypatch)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("alternate", [False, True])
@pytest.mark.parametrize("cuts", [[0, 96, 160], CUTS], ids=str)  # two ranks swap heads, four read by a chain
def test_steps_of_all_kinds_end(cuts: list[int], alternate: bool, recompute: bool) -> None:
    model = tiny_model(LAYERS, activation_checkpointing=recompute)
    run = run_in_turns(model, 3, cuts, alternate=alternate, timeout_seconds=30)
    assert len(run.gradients) == len(cuts) - 1


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("window_chunks", [1, 3])
def test_states_go_from_rank_to_rank(groups: int, window_chunks: int) -> None:
    case = random_case(68, heads=3, window_chunks=window_chunks)
    run_shards(case, [16, 4, 8, 40], head_split=HeadSplit(groups))  # a window that lies on three ranks


@pytest.mark.parametrize(("size", "groups"), [(2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("splits", ["operator", "routing"])
def test_members_of_nodes_swap_and_hand_on(splits: NodeSplits, size: int, groups: int) -> None:
    run_nodes(random_case(69, heads=5), [16, 24, 8, 21], size, groups, splits)


def test_a_prompt_is_read_and_a_sequence_learned_from_without_gradients_over_edges() -> None:
    model, spans = tiny_model([*LAYERS, *RECURRENCES]), list(pairwise(CUTS))
    ids, labels = tiny_batch(CUTS[-1])

    def step(rank: int, exchange: QueueExchange) -> None:
        mesh, part = cast(Mesh, SimpleNamespace(sequence_rank=rank)), slice(*spans[rank])
        truncated = TruncatedExchange(exchange, torch.device("cpu"))
        logits = model(ids[:, part], RankedSequence(mesh, part.start, truncated, spans))
        token_losses(logits, labels[:, part])[0].backward()
        with torch.no_grad():
            prefill(model, ids[:, part], RankedSequence(mesh, part.start, exchange, spans, rows.rank(rank)))

    rows = LogicalRow(len(spans))
    run_logical_ranks(len(spans), step, timeout_seconds=30)


def test_ranks_that_both_send_first_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    one_queue(monkeypatch, silence_seconds=0.2)
    zeros = (torch.zeros(1),)

    def both_send(rank: int, exchange: QueueExchange) -> Any:
        if rank == 0:
            exchange.send_next("there", zeros)
            return exchange.receive_next("back", zeros)
        exchange.send_previous("back", zeros)
        return exchange.receive_previous("there", zeros)

    with pytest.raises(TimeoutError, match="nobody takes it"):
        run_logical_ranks(2, both_send, timeout_seconds=5)
