"""What the plan says a rank keeps for the backward is what autograd keeps there."""

import copy
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvm_dist.config import DataConfig, RunConfig, TrainConfig
from kvm_dist.plan import make_plan
from models.backbone import Backbone
from models.loss import token_losses
from models.messages import edge_messages
from parallel.config import ParallelConfig
from parallel.mesh import Mesh
from parallel.sequence.ranks import RankedSequence
from tests.models.tiny import HYBRID, RECURRENCES, SIMPLER_RECURRENCES, tiny_batch, tiny_model
from tests.support.logical_ranks import QueueExchange, run_logical_ranks
from tests.support.saved_bytes import saved_bytes

TOKENS = 512
KINDS = [
    "kvm",
    "rwkv7",
    "sliding_window",
    "block_window",
    "ovq",
    "full_attention",
    *RECURRENCES,
    *SIMPLER_RECURRENCES,
]
WIDTHS = {"hidden_size": 96, "num_heads": 3, "head_dim": 32, "base_width": 96}
TOLERANCE = 0.15


def run_config(
    model: Backbone, ranks: int, *, sequences: int = 1, accumulation: int = 1, **parallel: Any
) -> RunConfig:
    return RunConfig(
        model=model.config,
        data=DataConfig(sequence_length=TOKENS),
        parallel=ParallelConfig(sequence=ranks, **parallel),
        train=TrainConfig(batch_sequences=sequences, accumulation=accumulation),
    )


def measured(model: Backbone, config: RunConfig) -> list[int]:
    """Bytes that each logical rank keeps of one forward and its loss."""
    ids, labels = tiny_batch(TOKENS, 1)
    spans = config.shards.spans

    def one(rank: int, exchange: QueueExchange) -> int:
        own, part = copy.deepcopy(model), slice(*spans[rank])
        mesh = cast(Mesh, SimpleNamespace(sequence_rank=rank))
        context = RankedSequence(mesh, part.start, exchange, spans)
        with saved_bytes(own.parameters()) as saved:
            loss, _ = token_losses(own(ids[:, part], context), labels[:, part])
        loss.backward()
        return saved.total

    return run_logical_ranks(len(spans), one)


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("layers", [[kind] * 2 for kind in KINDS] + [HYBRID], ids=str)
def test_activations_are_those_that_autograd_keeps(
    layers: list[str], precision: str, recomputed: bool
) -> None:
    model = tiny_model(layers, activation_checkpointing=recomputed, **WIDTHS)
    config = run_config(model, 1, precision=precision)
    (kept,) = measured(model.bfloat16() if precision == "bfloat16" else model, config)
    assert make_plan(config).memory.activations == pytest.approx(kept, rel=TOLERANCE)


@pytest.mark.parametrize("layers", [["kvm", "rwkv7"], HYBRID], ids=str)
def test_each_rank_keeps_its_shard_s_activations_and_the_states_it_received(layers: list[str]) -> None:
    model = tiny_model(layers, **WIDTHS)
    (alone,) = measured(model, run_config(model, 1))
    for ranks in (2, 4):
        config = run_config(model, ranks, shards="equal")
        plan = make_plan(config)
        received = [0] + [edge_bytes_of(config, start) for start, _ in config.shards.spans[1:]]
        for kept, shard, states in zip(measured(model, config), plan.shards, received, strict=True):
            assert kept - states == pytest.approx(alone / ranks, rel=0.05)
            assert shard.memory.activations + states == pytest.approx(kept, rel=TOLERANCE)


def edge_bytes_of(config: RunConfig, edge: int) -> int:
    messages = edge_messages(config.model, edge, config.shards.spans)
    return sum(one.size(4) for one in messages if one.phase == "forward")


def test_copies_of_what_a_step_sends_add_up_over_its_micro_batches() -> None:
    model = tiny_model(["kvm"])
    plans = [
        make_plan(run_config(model, 2, sequences=sequences, accumulation=accumulation))
        for sequences, accumulation in ((1, 1), (2, 2))
    ]
    (once, last), (twice, last_twice) = ([shard.memory.states for shard in plan.shards] for plan in plans)
    (layer,) = plans[0].layers
    assert twice - once == layer.boundary_bytes[0]
    assert last_twice - last == layer.returned_bytes[0]
