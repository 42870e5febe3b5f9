"""A step is one wave: no rank waits for another inside a layer. Proved with the gates of tests/support."""

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import Tensor

from models.backbone import Backbone, Block
from models.loss import token_losses
from models.messages import edge_messages
from parallel.config import ParallelConfig
from parallel.engine.deepspeed import Engine
from parallel.mesh import Mesh
from parallel.sequence.context import Exchange
from parallel.sequence.exchange import RankExchange
from parallel.sequence.ranks import RankedSequence
from parallel.sequence.recorded import Message, RecordedExchange, longest_chain
from parallel.world import World
from tests.models.tiny import RECURRENCES, tiny_batch, tiny_model
from tests.support.gates import FileGates, Places, ThreadGates, watched_reads
from tests.support.logical_ranks import run_logical_ranks
from tests.support.ranks import Ranks

KINDS = ["kvm", "rwkv7", "sliding_window", "block_window", "ovq", *RECURRENCES]
SHARD = 32  # tokens
Change = Callable[[Backbone, int, Exchange], Exchange]


def unchanged(model: Backbone, rank: int, exchange: Exchange) -> Exchange:
    return exchange


def gated_step(
    model: Backbone, ranks: int, rule: str, timeout_seconds: float = 30, change: Change = unchanged
) -> None:
    """A forward and a backward over logical ranks; `change` may spoil a rank's model or exchange."""
    ids, labels = tiny_batch(SHARD * ranks, batch=1)
    gates = ThreadGates(timeout_seconds)

    def step(rank: int, exchange: Exchange) -> None:
        own, part = copy.deepcopy(model), slice(rank * SHARD, (rank + 1) * SHARD)
        exchange = change(own, rank, exchange)
        places = Places(own, rank, ranks, gates)
        places.begin(rule, "only batch")
        mesh = cast(Mesh, SimpleNamespace(sequence_rank=rank))
        logits = own(ids[:, part], RankedSequence(mesh, part.start, exchange))
        token_losses(logits, labels[:, part])[0].backward()

    with watched_reads():
        run_logical_ranks(ranks, step, timeout_seconds=2 * timeout_seconds)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rank_reads_before_the_rank_after_is_in_the_next_layer(kind: str) -> None:
    gated_step(tiny_model([kind] * 3, token_shift=False), 4, "reads")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["layers", "starts"])
def test_ranks_finish_layers_last_and_lead_by_whole_passes(kind: str, rule: str) -> None:
    gated_step(tiny_model([kind] * 3), 4, rule)


def test_recomputed_activations_do_not_stop_the_wave() -> None:
    for rule in ("layers", "starts"):
        gated_step(tiny_model(["kvm", "rwkv7"] * 2, activation_checkpointing=True), 3, rule)


class LateExchange:
    """Sends nothing to the rank after until `flush`."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.has_previous, self.has_next = exchange.has_previous, exchange.has_next
        self.send_previous, self.receive_next = exchange.send_previous, exchange.receive_next
        self.receive_previous = exchange.receive_previous
        self.kept: list[tuple[str, tuple[Tensor, ...]]] = []

    def send_next(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        self.kept.append((name, tensors))

    def flush(self) -> None:
        for name, tensors in self.kept:
            self.exchange.send_next(name, tensors)
        self.kept.clear()


def send_after_attention(model: Backbone, rank: int, exchange: Exchange) -> Exchange:
    late = LateExchange(exchange)
    for block in model.layers:
        assert isinstance(block, Block)
        block.mixer.register_forward_hook(lambda *_: late.flush())
        block.feed_forward.expand.register_forward_pre_hook(lambda *_: late.flush())
    return late


def collective_in_every_layer(phase: str) -> Change:
    barrier = threading.Barrier(2, timeout=2)

    def change(model: Backbone, rank: int, exchange: Exchange) -> Exchange:
        def meet(*_: Any) -> None:
            barrier.wait()

        for block in model.layers:
            assert isinstance(block, Block)
            if phase == "forward":
                block.register_forward_hook(meet)
            else:
                block.register_full_backward_hook(meet)
        return exchange

    return change


@pytest.mark.parametrize("kind", KINDS)
def test_a_send_after_attention_would_be_caught(kind: str) -> None:
    model = tiny_model([kind] * 2, token_shift=False)
    with pytest.raises((TimeoutError, ConnectionError), match=r"gate .*rank 1 begins layer 1 forward"):
        gated_step(model, 2, "reads", 1, send_after_attention)


@pytest.mark.parametrize("rule", ["reads", "layers", "starts"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_collective_in_every_layer_would_be_caught(phase: str, rule: str) -> None:
    model = tiny_model(["kvm"] * 2, token_shift=rule != "reads")
    with pytest.raises((TimeoutError, threading.BrokenBarrierError)):
        gated_step(model, 2, rule, 1, collective_in_every_layer(phase))


ACCUMULATION = 2
RULES = ("reads", "starts", "layers", "starts")  # of the micro-batches in order


def gated_training(world: World, stage: int, folder: Path) -> tuple[list[Message], list[float]]:
    """What this rank logged while the real engine trained, and its gradient norms."""
    config = ParallelConfig(sequence=world.size, zero_stage=stage, timeout_seconds=20)
    mesh = Mesh.build(world, config)
    model = tiny_model(["kvm", "rwkv7"] * 2, token_shift=False)
    places = Places(model, mesh.sequence_rank, mesh.sequence_size, FileGates(folder, timeout_seconds=15))
    engine = Engine(
        model,
        [{"params": list(model.parameters()), "lr": 1e-3, "weight_decay": 0.0}],
        config,
        world,
        betas=(0.9, 0.95),
        eps=1e-8,
        gradient_clipping=1.0,
        accumulation=ACCUMULATION,
        device=world.device,
    )
    exchange = RankExchange(mesh)
    recorded = RecordedExchange(exchange, mesh.sequence_rank)
    part = slice(mesh.sequence_rank * SHARD, (mesh.sequence_rank + 1) * SHARD)
    norms = []
    with watched_reads():
        for number, rule in enumerate(RULES):
            ids, labels = tiny_batch(SHARD * mesh.sequence_size, batch=1, seed=number)
            places.begin(rule, f"batch {number}")
            logits = engine.module(ids[:, part], RankedSequence(mesh, part.start, recorded))
            engine.backward(token_losses(logits, labels[:, part])[0] / labels.numel())
            if number % ACCUMULATION == ACCUMULATION - 1:
                norms.append(engine.step([1e-3], [0.0]).gradient_norm)
                exchange.drain()
    return recorded.messages, norms


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_engine_does_not_stop_the_wave(two_ranks: Ranks, tmp_path: Path, stage: int) -> None:
    (first, norms), (second, other_norms) = two_ranks.run(gated_training, stage, tmp_path)

    assert norms == other_norms
    assert longest_chain([first, second]) == 2 * len(RULES)  # forward and backward of each micro-batch
    crossing = edge_messages(tiny_model(["kvm", "rwkv7"] * 2, token_shift=False).config, SHARD)
    for log, phase in ((first, "forward"), (second, "backward")):
        sent = [(one.name, one.bytes) for one in log if one.operation == "send"]
        assert sent == [(one.name, one.size(4)) for one in crossing if one.phase == phase] * len(RULES)
