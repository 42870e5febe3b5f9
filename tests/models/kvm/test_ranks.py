"""A sequence cut over ranks gives, bit for bit, what one rank gives."""

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from models.budget import FixedBudget, PowerLawBudget, SlotBudget
from models.kvm import torch_passes
from models.kvm.memory import ROW_BLOCK
from parallel.sequence.context import HeadSplit
from tests.models.kvm.cases import PARAMETERS, Case, assert_close, gradients, random_case
from tests.support.logical_ranks import QueueExchange, queue_exchanges, run_logical_ranks

PER_TOKEN = ("q", "k", "v", "merge_gate")
C = 4


def run_shards(case: Case, lengths: list[int], **more: Any) -> tuple[dict[str, Tensor], list[QueueExchange]]:
    """Output and gradients of a case cut into shards of these lengths: tokens joined, parameters summed."""
    stops = list(accumulate(lengths))
    exchanges: dict[int, QueueExchange] = {}

    def shard(rank: int, exchange: QueueExchange) -> dict[str, Tensor]:
        start, stop = stops[rank] - lengths[rank], stops[rank]
        exchanges[rank] = exchange
        leaves = case.leaves(start, stop)
        output, _ = case.call(leaves, exchange=exchange, start=start, **more)
        output.backward(case.grad_output[:, start:stop])
        return {"output": output.detach(), **gradients(leaves)}

    parts = run_logical_ranks(len(lengths), shard, timeout_seconds=20)
    joined = {
        name: sum((part[name] for part in parts[1:]), parts[0][name])
        if name in PARAMETERS
        else torch.cat([part[name] for part in parts], dim=1)
        for name in parts[0]
    }
    return joined, [exchanges[rank] for rank in range(len(lengths))]


def assert_bitwise_equal_to_one_rank(case: Case, lengths: list[int], **more: Any) -> None:
    one = case.run("torch")
    wanted = {"output": one.output, **one.gradients}
    got, _ = run_shards(case, lengths, **more)
    for name, tensor in wanted.items():
        if name not in PARAMETERS:
            assert torch.equal(got[name], tensor), f"{name} of shards {lengths}"
    assert_close(
        {name: got[name] for name in PARAMETERS if name in got},
        {name: wanted[name] for name in PARAMETERS if name in wanted},
        1e-5,
    )


@pytest.mark.parametrize(
    "budget", [FixedBudget(slots=ROW_BLOCK), PowerLawBudget(factor=4, minimum=ROW_BLOCK)]
)
def test_a_state_of_whole_blocks_of_slots_gives_the_bits_of_one_rank(budget: SlotBudget) -> None:
    case = random_case(6 * ROW_BLOCK + 5, chunk=ROW_BLOCK, budget=budget)
    assert_bitwise_equal_to_one_rank(case, [2 * ROW_BLOCK, ROW_BLOCK, 3 * ROW_BLOCK + 5])
    exact = random_case(6 * ROW_BLOCK + 5, chunk=ROW_BLOCK, budget=budget, dtype=torch.float64)
    wanted, got = exact.run("reference"), exact.run("torch")
    assert_close({"output": got.output}, {"output": wanted.output}, 1e-9)
    assert_close(got.gradients, wanted.gradients, 1e-9)


@pytest.mark.parametrize("window_chunks", [1, 2, 3])
@pytest.mark.parametrize(
    "lengths",
    [[32, 32], [16] * 4, [8] * 8, [4, 40, 8, 13], [12, 4, 4, 4, 7], [60, 4], [4] * 9 + [3], [64]],
)
def test_shards_give_the_bits_of_one_rank(window_chunks: int, lengths: list[int]) -> None:
    case = random_case(sum(lengths), batch=2, window_chunks=window_chunks)
    assert_bitwise_equal_to_one_rank(case, lengths)


@pytest.mark.parametrize(
    "settings",
    [
        {"value_radius": False},
        {"gate_appends": True, "gate_first_state": True},
        {"gate": False, "sinks": 0},
        {"temperatures": False},
        {"max_slots": 6},
        {"window_chunks": 5},
    ],
)
def test_shards_give_the_bits_of_one_rank_under_every_switch(settings: dict[str, Any]) -> None:
    assert_bitwise_equal_to_one_rank(random_case(61, **settings), [16, 12, 24, 9])


def test_shards_give_the_bits_of_one_rank_at_a_common_head_width() -> None:
    case = random_case(640, heads=3, width=64, chunk=64, rotary_dims=32)
    assert_bitwise_equal_to_one_rank(case, [256, 64, 192, 128])


@pytest.mark.parametrize(
    ("groups", "settings"),
    [
        (2, {"window_chunks": 1}),
        (3, {"gate_appends": True, "gate_first_state": True, "window_chunks": 3}),
        (2, {"value_radius": False, "gate": False, "temperatures": False}),
        (5, {"batch": 1, "width": 24, "rotary_dims": 0}),
    ],
)
def test_states_handed_over_by_groups_of_heads_have_the_bits_of_one_rank(
    groups: int, settings: dict[str, Any]
) -> None:
    case = random_case(77, **{"batch": 2, "heads": 5, **settings})
    assert_bitwise_equal_to_one_rank(case, [16, 4, 40, 17], head_split=HeadSplit(groups))


def test_groups_of_heads_at_a_common_head_width_have_the_bits_of_one_rank() -> None:
    case = random_case(640, heads=3, width=64, chunk=64, rotary_dims=32)
    assert_bitwise_equal_to_one_rank(case, [256, 64, 192, 128], head_split=HeadSplit(3))


def test_the_first_group_of_heads_leaves_before_the_second_is_received() -> None:
    case = random_case(48, heads=4)
    log: list[tuple[str, str]] = []

    class Logged(QueueExchange):
        def send_next(self, name: str, tensors: tuple[Tensor, ...]) -> None:
            log.append(("send", name))
            super().send_next(name, tensors)

        def send_previous(self, name: str, tensors: tuple[Tensor, ...]) -> None:
            log.append(("send", name))
            super().send_previous(name, tensors)

        def _receive(self, name: str, *more: Any) -> tuple[Tensor, ...]:
            log.append(("receive", name))
            return super()._receive(name, *more)

    def shard(rank: int, exchange: QueueExchange) -> None:
        if rank == 1:
            exchange.__class__ = Logged
        leaves = case.leaves(16 * rank, 16 * rank + 16)
        split = HeadSplit(2)
        output, _ = case.call(leaves, exchange=exchange, start=16 * rank, head_split=split)
        output.backward(case.grad_output[:, 16 * rank : 16 * rank + 16])

    run_logical_ranks(3, shard, timeout_seconds=20)
    turns = [("receive", "kvm.{}"), ("send", "kvm.{}")] * 2
    for name in ("keys", "values", "slots.gradient"):
        mine = [(what, one) for what, one in log if one == f"kvm.{name}"]
        assert mine == [(what, one.format(name)) for what, one in turns]


def test_more_groups_than_heads_are_refused() -> None:
    case = random_case(16)
    first, _ = queue_exchanges(2)
    with pytest.raises(ValueError, match="3 groups of 2 heads: want parallel"):
        case.call(case.leaves(), exchange=first, head_split=HeadSplit(3))


def test_waiting_gradients_that_are_too_many_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_passes, "WAITING_BYTES", 1)
    assert_bitwise_equal_to_one_rank(random_case(64), [16] * 4)
    assert_bitwise_equal_to_one_rank(random_case(64), [16] * 4, head_split=HeadSplit(2))


def test_bytes_sent_are_the_states_and_the_windows_and_grow_with_neither_ranks_nor_tokens() -> None:
    batch, heads, width, window_chunks = 2, 2, 8, 3
    case = random_case(64, batch=batch, heads=heads, width=width, window_chunks=window_chunks)
    _, exchanges = run_shards(case, [16, 24, 24])
    for rank, stop in enumerate((16, 40)):
        slots = min(max(int(2 * stop**0.5), C), stop - C * (window_chunks - 1))
        rows = batch * heads * (2 * width + 1) * 4
        forward = {name: size for direction, name, size in exchanges[rank].sent if direction == "next"}
        assert list(forward) == ["kvm.window", "kvm.keys", "kvm.values"]
        assert forward["kvm.window"] == (window_chunks - 1) * C * rows
        assert forward["kvm.keys"] + forward["kvm.values"] == slots * rows
        backward = [size for direction, _, size in exchanges[rank + 1].sent if direction == "previous"]
        assert sum(backward) == slots * rows + (window_chunks - 1) * C * batch * heads * (4 * width + 1) * 4
    assert not [message for message in exchanges[-1].sent if message[0] == "next"]


def test_the_state_is_sent_before_any_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(Exception):
        pass

    def attend(*_: object) -> None:
        raise Stop

    monkeypatch.setattr(torch_passes, "attend", attend)
    case = random_case(16)
    first, _ = queue_exchanges(2)
    with pytest.raises(Stop):
        case.call(case.leaves(), exchange=first)
    assert [name for _, name, _ in first.sent] == ["kvm.window", "kvm.keys", "kvm.values"]
