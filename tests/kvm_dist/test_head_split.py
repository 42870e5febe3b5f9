"""Groups of heads and nodes of ranks, from the configuration to the layers of a model."""

import pytest
import torch
from torch import Tensor

from kvm_dist.config import DataConfig, RunConfig
from kvm_dist.sequence_split import SequenceSplit
from models.sequence_shards import sequence_shards
from parallel import collectives
from parallel.config import NodeSplits, ParallelConfig
from parallel.mesh import Mesh
from parallel.world import World
from tests.models.tiny import tiny_batch, tiny_model
from tests.support.ranks import Ranks

TOKENS = 150


def step(
    world: World,
    head_groups: int,
    head_parallel: int,
    node_splits: NodeSplits = "operator",
    layers: tuple[str, ...] = ("kvm", "rwkv7", "kvm"),
    node_ranks: int = 1,
    tokens: int = TOKENS,
) -> tuple[Tensor, dict[str, Tensor]]:
    """This rank's logits, and the gradients of all ranks."""
    mesh = Mesh.build(world, ParallelConfig(sequence=4, head_parallel=head_parallel, timeout_seconds=30))
    model = tiny_model(list(layers))
    shards = sequence_shards(model.config, tokens, 4, node_ranks=node_ranks)
    split = SequenceSplit(
        mesh, shards, head_groups=head_groups, head_parallel=head_parallel, node_splits=node_splits
    )
    assert (split.context().head_split.node is None) == (head_parallel == 1)
    ids, labels = tiny_batch(tokens)
    logits = model(split.inputs(ids), split.context())
    valid = split.labels(labels) >= 0
    (logits.square().mean(dim=-1) * valid).sum().backward()
    split.drain()
    found = {
        name: collectives.sum(one.grad, mesh.row)
        for name, one in model.named_parameters()
        if one.grad is not None
    }
    return logits.detach(), found


def test_groups_of_heads_and_nodes_of_ranks_change_no_bit_of_a_model() -> None:
    with Ranks(4) as ranks:
        plain, *others = (
            ranks.run(step, *degrees) for degrees in ((1, 1), (2, 1), (1, 2), (1, 2, "routing"))
        )
    for results in others:
        for (logits, gradients), (wanted, wanted_gradients) in zip(results, plain, strict=True):
            assert torch.equal(logits, wanted)
            for name, gradient in wanted_gradients.items():
                if "temperature" in name or "state_norm" in name:
                    torch.testing.assert_close(gradients[name], gradient)
                else:
                    assert torch.equal(gradients[name], gradient), name


def test_shards_inside_a_node_that_are_no_whole_blocks_change_no_bit_of_a_forward() -> None:
    layers = ("kvm", "kvm")
    with Ranks(4) as ranks:
        plain = ranks.run(step, 1, 1, "operator", layers, 1, 170)
        nodes = ranks.run(step, 1, 2, "operator", layers, 2, 170)
    lengths = [logits.shape[1] for logits, _ in nodes]
    assert any(length % 16 for length in lengths)
    assert torch.equal(*(torch.cat([logits for logits, _ in run], dim=1) for run in (nodes, plain)))
    for name, gradient in plain[0][1].items():
        torch.testing.assert_close(nodes[0][1][name], gradient, rtol=1e-5, atol=2e-6)


def test_nodes_that_are_not_full_are_refused() -> None:
    with pytest.raises(ValueError, match=r"head_parallel=2 does not divide parallel\.sequence=3"):
        ParallelConfig(sequence=3, head_parallel=2)


@pytest.mark.parametrize("name", ["head_groups", "head_parallel"])
def test_more_groups_than_heads_are_refused_before_a_run(name: str) -> None:
    heads = RunConfig().model.num_heads
    data = DataConfig(sequence_length=512 * heads)
    RunConfig(data=data, parallel=ParallelConfig(sequence=2 * heads, **{name: heads}))
    with pytest.raises(
        ValueError, match=rf"parallel\.{name}={2 * heads} is more than model\.num_heads={heads}"
    ):
        RunConfig(data=data, parallel=ParallelConfig(sequence=2 * heads, **{name: 2 * heads}))
