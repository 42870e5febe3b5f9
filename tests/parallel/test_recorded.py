import pytest
import torch
from torch import Tensor

from parallel.config import ParallelConfig
from parallel.mesh import Mesh
from parallel.sequence.context import Exchange
from parallel.sequence.exchange import RankExchange
from parallel.sequence.recorded import Message, RecordedExchange, ZeroExchange, longest_chain
from parallel.world import World
from tests.support.logical_ranks import run_logical_ranks
from tests.support.ranks import Ranks

STATE: tuple[Tensor, ...] = (torch.arange(3.0), torch.arange(2, dtype=torch.int16))
STATE_BYTES = 3 * 4 + 2 * 2


def step(exchange: Exchange, layers: int) -> None:
    """A state to the rank after in every layer, its gradient back in the layers' reverse order."""
    state = STATE
    for layer in range(layers):
        if exchange.has_previous:
            state = exchange.receive_previous(f"{layer}.toy.state", STATE)
        if exchange.has_next:
            exchange.send_next(f"{layer}.toy.state", state)
    for layer in reversed(range(layers)):
        if exchange.has_next:
            exchange.receive_next(f"{layer}.toy.state gradient", STATE[:1])
        if exchange.has_previous:
            exchange.send_previous(f"{layer}.toy.state gradient", state[:1])


def recorded(ranks: int, layers: int, steps: int = 1) -> list[list[Message]]:
    def work(rank: int, exchange: Exchange) -> list[Message]:
        own = RecordedExchange(exchange, rank)
        for _ in range(steps):
            step(own, layers)
        return own.messages

    return run_logical_ranks(ranks, work, timeout_seconds=20)


def test_both_ends_of_every_message_are_logged_with_what_it_was() -> None:
    first, second = recorded(2, layers=1)
    name, size = "0.toy.state", STATE_BYTES
    assert first == [
        Message(0, "send", 0, 1, name, "forward", size),
        Message(1, "receive", 1, 0, f"{name} gradient", "backward", 12),
    ]
    assert second == [
        Message(0, "receive", 0, 1, name, "forward", size),
        Message(1, "send", 1, 0, f"{name} gradient", "backward", 12),
    ]
    assert [message.rank for message in first + second] == [0, 0, 1, 1]


@pytest.mark.parametrize(("name", "layer"), [("12.kvm.keys", 12), ("kvm.keys", None), ("0.a gradient", 0)])
def test_the_layer_is_the_leading_number_of_the_name(name: str, layer: int | None) -> None:
    assert Message(0, "send", 0, 1, name, "forward", 4).layer == layer


def logged_on_a_rank(world: World) -> tuple[list[Message], int]:
    mesh = Mesh.build(world, ParallelConfig(sequence=2, timeout_seconds=30))
    exchange = RankExchange(mesh)
    own = RecordedExchange(exchange, mesh.sequence_rank)
    step(own, layers=2)
    exchange.drain()
    return own.messages, exchange.bytes_sent


def test_processes_log_what_threads_log(two_ranks: Ranks) -> None:
    found = two_ranks.run(logged_on_a_rank)
    assert [messages for messages, _ in found] == recorded(2, layers=2)
    assert [sent for _, sent in found] == [2 * (16 + 16), 2 * 16]  # every tensor padded to 16 bytes


@pytest.mark.parametrize("has_previous", [False, True])
@pytest.mark.parametrize("has_next", [False, True])
def test_a_rank_that_runs_alone_logs_what_it_logs_among_others(has_previous: bool, has_next: bool) -> None:
    alone = RecordedExchange(ZeroExchange(has_previous=has_previous, has_next=has_next), rank=1)
    step(alone, layers=2)
    if has_previous:
        assert alone.messages == recorded(3 if has_next else 2, layers=2)[1]
    else:
        assert [m.name for m in alone.messages] == [m.name for m in recorded(2, 2)[0] if has_next]


def test_zeros_arrive_in_the_shapes_and_dtypes_wanted() -> None:
    arrived = ZeroExchange(has_previous=True, has_next=False).receive_previous("state", STATE)
    assert [(t.shape, t.dtype) for t in arrived] == [(t.shape, t.dtype) for t in STATE]
    assert not any(tensor.any() for tensor in arrived)


@pytest.mark.parametrize("layers", [1, 2, 7])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_messages_of_a_wavefront_wait_for_one_another_once_per_rank_whatever_the_layers(
    ranks: int, layers: int
) -> None:
    assert longest_chain(recorded(ranks, layers)) == 2 * (ranks - 1)  # forward and backward
    assert longest_chain(recorded(ranks, layers, steps=3)) == 3 * 2 * (ranks - 1)


def all_gather(exchange: Exchange, name: str, own: Tensor) -> None:
    """Of two ranks, the second's part comes after it has seen the first's."""
    if exchange.has_next:
        exchange.send_next(name, (own,))
        exchange.receive_next(name, (own,))
    else:
        exchange.receive_previous(name, (own,))
        exchange.send_previous(name, (own,))


@pytest.mark.parametrize("layers", [1, 4])
def test_a_collective_in_every_layer_makes_the_chain_as_long_as_the_layers(layers: int) -> None:
    def work(rank: int, exchange: Exchange) -> list[Message]:
        own = RecordedExchange(exchange, rank)
        for layer in range(layers):
            all_gather(own, f"{layer}.gathered", STATE[0])
        return own.messages

    assert longest_chain(run_logical_ranks(2, work)) == 2 * layers


def test_logs_with_a_message_missing_are_refused() -> None:
    first, second = recorded(2, layers=2)
    with pytest.raises(ValueError, match="1 messages from rank 0 to rank 1 were never received"):
        longest_chain([first, [m for m in second if m.number != 1]])
    with pytest.raises(ValueError, match=r"1\.toy\.state.* was never sent"):
        longest_chain([[m for m in first if m.number != 1], second])
