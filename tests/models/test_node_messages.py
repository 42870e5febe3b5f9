"""Ranks that split KVM by heads send each other what the closed forms list."""

import copy
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from models.config import ModelConfig
from models.loss import token_losses
from models.messages import edge_messages
from models.node_messages import node_messages
from models.operator_messages import operator_messages
from parallel.config import NodeSplits
from parallel.mesh import Mesh
from parallel.sequence.context import Exchange, HeadSplit
from parallel.sequence.ranks import RankedSequence
from parallel.sequence.recorded import Message, RecordedExchange
from tests.models.tiny import tiny_batch, tiny_model
from tests.support.logical_all_to_all import logical_node
from tests.support.logical_peers import LogicalPeers
from tests.support.logical_ranks import run_logical_ranks


def listed(
    config: ModelConfig, edge: int, size: int, phase: str, element_bytes: int, splits: NodeSplits
) -> list[tuple[str, int]]:
    messages = edge_messages(config, edge, head_groups=size, head_parallel=size, node_splits=splits)
    return [(one.name, one.size(element_bytes, 2)) for one in messages if one.phase == phase]


@pytest.mark.parametrize("splits", ["operator", "routing"])
@pytest.mark.parametrize(
    ("bounds", "size", "dtype"),
    [
        ([0, 32, 128, 160, 201], 2, torch.bfloat16),
        ([0, 96, 192, 224], 3, torch.float32),
        ([0, *range(32, 257, 32)], 4, torch.float32),
    ],
)
def test_peers_and_edges_get_what_is_listed(
    bounds: list[int], size: int, dtype: torch.dtype, splits: NodeSplits
) -> None:
    model = tiny_model(["kvm", "rwkv7", "kvm"], num_heads=5, head_dim=8).to(dtype)
    ids, labels = tiny_batch(bounds[-1])
    spans = tuple(pairwise(bounds))
    row = LogicalPeers(len(spans))
    peers = [row.of(rank) for rank in range(len(spans))]

    def step(rank: int, exchange: Exchange) -> list[Message]:
        part, own = slice(*spans[rank]), copy.deepcopy(model)
        recorded = RecordedExchange(exchange, rank)
        mesh = cast(Mesh, SimpleNamespace(sequence_rank=rank))
        groups = size if splits == "routing" else 1
        split = HeadSplit(groups, logical_node(peers[rank], rank, size, spans, splits))
        context = RankedSequence(mesh, part.start, recorded, spans, head_split=split)
        token_losses(own(ids[:, part], context), labels[:, part])[0].backward()
        return recorded.messages

    for rank, log in enumerate(run_logical_ranks(len(spans), step)):
        messages = node_messages if splits == "routing" else operator_messages
        to_peers = messages(model.config, spans, size, rank)
        width = dtype.itemsize
        assert peers[rank].sent == [(p.to, p.message.name, p.message.size(width, 2)) for p in to_peers]
        for phase, edge in (("forward", spans[rank][1]), ("backward", spans[rank][0])):
            sent = [(one.name, one.bytes) for one in log if (one.operation, one.phase) == ("send", phase)]
            inside = 0 < edge < bounds[-1]
            assert sent == (listed(model.config, edge, size, phase, width, splits) if inside else [])
