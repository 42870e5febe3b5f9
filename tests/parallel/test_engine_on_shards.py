"""The engine and the hand-overs at once: their collectives and messages must not wait for each other."""

import copy

import pytest
import torch
from torch import Tensor, nn

from parallel.config import ParallelConfig
from parallel.engine.deepspeed import Engine
from parallel.mesh import Mesh
from parallel.sequence.context import SequenceContext, WholeSequence
from parallel.sequence.exchange import RankExchange
from parallel.sequence.ranks import RankedSequence
from parallel.sequence.shard import equal_shards
from parallel.world import World
from tests.parallel.toy import ToyNet
from tests.support.ranks import Ranks

LENGTH, MICRO_BATCHES, STEPS = 16, 2, 3


def net() -> ToyNet:
    torch.manual_seed(1)
    return ToyNet(layers=3)


def batch(step: int, micro_batch: int, data_rank: int) -> tuple[Tensor, Tensor]:
    """(inputs, weights of the loss) of one whole sequence."""
    generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + data_rank)
    return torch.randn(2, LENGTH, 5, generator=generator), torch.randn(LENGTH, 5, generator=generator)


def loss(model: nn.Module, inputs: Tensor, weights: Tensor, context: SequenceContext) -> Tensor:
    loss_sum: Tensor = (model(inputs, context) * weights).sum() / 50
    return loss_sum


def train_on_shards(world: World, data: int, sequence: int, stage: int) -> dict[str, Tensor]:
    """First moments after STEPS steps: sums of gradients, so that Adam magnifies no rounding."""
    config = ParallelConfig(
        data=data, sequence=sequence, zero_stage=stage, timeout_seconds=20, bucket_elements=40
    )
    mesh = Mesh.build(world, config)
    exchange = RankExchange(mesh)
    model = net()
    engine = Engine(
        model,
        [{"params": list(model.parameters()), "lr": 1e-3, "weight_decay": 0.0}],
        config,
        world,
        betas=(0.9, 0.95),
        eps=1e-1,
        gradient_clipping=0.0,
        accumulation=MICRO_BATCHES,
        device=world.device,
    )
    start, stop = equal_shards(LENGTH, sequence)[mesh.sequence_rank]
    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            inputs, weights = batch(step, micro_batch, mesh.data_rank)
            context = RankedSequence(mesh, start, exchange)
            engine.backward(loss(engine.module, inputs[:, start:stop], weights[start:stop], context))
        assert engine.step([1e-3], [0.0]).applied
        exchange.drain()
    return {name: tensors["exp_avg"] for name, tensors in engine.named_tensors()}


def train_plainly(data: int) -> dict[str, Tensor]:
    model = copy.deepcopy(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-1, weight_decay=0.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro_batch in range(MICRO_BATCHES):
            for data_rank in range(data):
                loss(model, *batch(step, micro_batch, data_rank), WholeSequence()).backward()
        optimizer.step()
    return {name: optimizer.state[parameter]["exp_avg"] for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("data", "sequence"), [(1, 2), (1, 4), (2, 2)])
def test_shards_train_like_one_rank_at_every_stage(
    two_ranks: Ranks, four_ranks: Ranks, data: int, sequence: int, stage: int
) -> None:
    ranks = two_ranks if data * sequence == 2 else four_ranks
    wanted = train_plainly(data)
    for ours in ranks.run(train_on_shards, data, sequence, stage):
        for name, moment in wanted.items():
            assert float((ours[name] - moment).abs().max()) <= 3e-6 * float(moment.abs().max()), name
