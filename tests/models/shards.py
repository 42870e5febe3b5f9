"""Shards of one sequence as logical ranks of this process, each with its own copy of a model."""

import copy
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from models.backbone import Backbone
from models.loss import token_losses
from parallel.mesh import Mesh
from parallel.sequence.ranks import RankedSequence
from parallel.sequence.truncated import TruncatedExchange
from tests.support.logical_all_to_all import LogicalRow
from tests.support.logical_ranks import QueueExchange, run_logical_ranks

Sent = list[tuple[str, str, int]]  # direction, name, bytes


def run_on_shards(
    model: Backbone, input_ids: Tensor, labels: Tensor, cuts: list[int], *, truncate_gradients: bool = False
) -> tuple[Tensor, dict[str, list[Tensor]], list[Sent]]:
    """Logits of the whole sequence, every shard's gradients of the summed loss, and what each shard sent."""
    bounds = [0, *cuts, input_ids.shape[1]]
    spans = list(pairwise(bounds))
    row = LogicalRow(len(spans))

    def one(rank: int, exchange: QueueExchange) -> tuple[Tensor, dict[str, Tensor], Sent]:
        part, own = slice(*spans[rank]), copy.deepcopy(model)
        mesh = cast(Mesh, SimpleNamespace(sequence_rank=rank))
        used = TruncatedExchange(exchange, input_ids.device) if truncate_gradients else exchange
        all_to_all = None if truncate_gradients else row.rank(rank)
        context = RankedSequence(mesh, bounds[rank], used, spans, all_to_all)
        logits = own(input_ids[:, part], context)
        token_losses(logits, labels[:, part])[0].backward()
        gradients = {name: p.grad for name, p in own.named_parameters() if p.grad is not None}
        return logits.detach(), gradients, exchange.sent

    results = run_logical_ranks(len(cuts) + 1, one)
    logits = torch.cat([result[0] for result in results], dim=1)
    names = [name for name, _ in model.named_parameters()]
    gradients = {name: [result[1][name] for result in results] for name in names}
    return logits, gradients, [result[2] for result in results]
