"""The plan's bytes and memory are those of ranks that split KVM by heads, too."""

import copy
from types import SimpleNamespace
from typing import cast

import pytest

from kvm_dist.config import DataConfig, RunConfig, TrainConfig
from kvm_dist.plan import make_plan
from kvm_dist.plan_messages import traffic
from launch.plan_table import print_plan
from models.backbone import Backbone
from models.loss import token_losses
from parallel.config import NodeSplits, ParallelConfig
from parallel.mesh import Mesh
from parallel.sequence.context import Exchange, HeadSplit
from parallel.sequence.ranks import RankedSequence
from parallel.sequence.recorded import RecordedExchange
from tests.models.tiny import tiny_batch, tiny_model
from tests.support.logical_all_to_all import logical_node
from tests.support.logical_peers import LogicalPeers
from tests.support.logical_ranks import run_logical_ranks
from tests.support.saved_bytes import saved_bytes

RANKS, TOKENS = 4, 512
LAYERS = ["kvm", "rwkv7", "kvm"]


def run_config(model: Backbone, size: int, splits: NodeSplits = "operator") -> RunConfig:
    return RunConfig(
        model=model.config,
        data=DataConfig(sequence_length=TOKENS),
        parallel=ParallelConfig(sequence=RANKS, head_parallel=size, node_splits=splits, shards="equal"),
        train=TrainConfig(batch_sequences=1),
    )


def step(model: Backbone, config: RunConfig) -> list[tuple[int, int]]:
    """Bytes that each logical rank sends in a forward and backward, and keeps between them."""
    ids, labels = tiny_batch(TOKENS, 1)
    spans, size, splits = config.shards.spans, config.parallel.head_parallel, config.parallel.node_splits
    row = LogicalPeers(RANKS)

    def one(rank: int, exchange: Exchange) -> tuple[int, int]:
        own, part, peers = copy.deepcopy(model), slice(*spans[rank]), row.of(rank)
        recorded = RecordedExchange(exchange, rank)
        mesh = cast(Mesh, SimpleNamespace(sequence_rank=rank))
        split = HeadSplit(size if splits == "routing" else 1, logical_node(peers, rank, size, spans, splits))
        context = RankedSequence(mesh, part.start, recorded, spans, head_split=split)
        with saved_bytes(own.parameters()) as saved:
            loss, _ = token_losses(own(ids[:, part], context), labels[:, part])
        loss.backward()
        over_edges = sum(message.bytes for message in recorded.messages if message.operation == "send")
        return over_edges + sum(size for _, _, size in peers.sent), saved.total

    return run_logical_ranks(RANKS, one)


@pytest.mark.parametrize("splits", ["operator", "routing"])
@pytest.mark.parametrize(("size", "kv_heads"), [(2, None), (2, 2), (4, None)])
def test_ranks_of_a_node_send_and_keep_what_is_planned(
    size: int, splits: NodeSplits, kv_heads: int | None
) -> None:
    kvm = {"chunk": 16, "kv_heads": kv_heads}
    model = tiny_model(LAYERS, hidden_size=128, num_heads=4, head_dim=32, base_width=128, kvm=kvm)
    config = run_config(model, size, splits)
    planned = traffic(config, config.shards.spans)
    plan = make_plan(config)
    for rank, (sent, kept) in enumerate(step(model, config)):
        swapped = sum(size for (_, source), size in planned.swapped.items() if source == rank)
        assert planned.sent[rank] + swapped == sent
        told = plan.shards[rank].memory.activations + planned.received[rank]
        assert told == pytest.approx(kept, rel=0.05)


@pytest.mark.parametrize("splits", ["operator", "routing"])
def test_over_the_end_of_a_node_goes_as_much_as_without_nodes(splits: NodeSplits) -> None:
    model = tiny_model(LAYERS, num_heads=4, head_dim=8)
    whole, split = (make_plan(run_config(model, size, splits)) for size in (1, 2))
    for before, now in zip(whole.layers, split.layers, strict=True):
        assert now.boundary_bytes[1] == before.boundary_bytes[1]
        assert now.returned_bytes[1] == before.returned_bytes[1]
        if now.kind == "kvm":
            assert now.boundary_bytes[0] < before.boundary_bytes[0]
            assert min(now.swapped_bytes) > 0
        else:
            assert now == before
    assert split.layers[0].swapped_bytes[3] > 0


@pytest.mark.parametrize("shards", ["balanced", "equal"])
def test_ranks_of_a_node_share_its_cost(shards: str) -> None:
    config = run_config(tiny_model(["kvm"], num_heads=4, head_dim=8), 4)
    parallel = config.parallel.model_copy(update={"shards": shards})
    plan = make_plan(config.model_copy(update={"parallel": parallel}))
    assert [shard.cost for shard in plan.shards] == [0.25] * RANKS
    assert plan.imbalance == 0


def test_the_table_tells_what_passes_between_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(run_config(tiny_model(["kvm"], num_heads=4, head_dim=8), 2), None, as_json=False)
    shown = " ".join(capsys.readouterr().out.split())
    assert "512 B ... 17.5 KiB + 66 KiB swapped" in shown
