"""What scaling is modelled from: work on a shard, the order of messages, and the methods side by side."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from kvm_dist.bench.scaling.accumulated import Accumulation, accumulated
from kvm_dist.bench.scaling.clock import ClockedExchange, TurnExchange, Wires
from kvm_dist.bench.scaling.cluster import ASSUMED, CLUSTERS, Cluster, variations
from kvm_dist.bench.scaling.cuts import GROWTH_COST, by_seconds
from kvm_dist.bench.scaling.extrapolate import (
    BY_HEADS,
    BY_HEADS_GROUPED,
    HEADLINES,
    IN_PAIRS,
    IN_TURNS,
    LENGTHS,
    METHODS,
    ONE,
    RANKS,
    SEQUENCES,
    VARIED,
    WAVE,
    _rows,
    extrapolate,
    language_model,
    method,
    sensitivities,
)
from kvm_dist.bench.scaling.opponents import gathered_recurrence, ring_attention, ulysses
from kvm_dist.bench.scaling.program import Program, Receive, Send, Work
from kvm_dist.bench.scaling.rank import ranked_context
from kvm_dist.bench.scaling.relays import kvm_relay, rwkv7_relay
from kvm_dist.bench.scaling.replay import replay
from kvm_dist.bench.scaling.two_level import kvm_by_heads, kvm_by_routes, one_of_each_node
from kvm_dist.bench.scaling.work import kvm_work, outside
from models.backbone import Backbone
from models.budget import FixedBudget
from models.config import ModelConfig
from models.initialise import initialise
from models.loss import token_losses
from models.sequence_shards import sequence_shards

H200 = CLUSTERS["H200"]
TINY = ModelConfig.model_validate(
    {
        "vocab_size": 32,
        "hidden_size": 32,
        "num_layers": 3,
        "num_heads": 2,
        "kvm": {"chunk": 16, "budget": {"kind": "power_law", "factor": 4, "minimum": 16}},
        "rwkv7": {"head_dim": 16},
    }
)
SPANS = ((0, 64), (64, 96), (96, 160))


def logged(model: ModelConfig) -> list[list[tuple[str, int, str, int]]]:
    """(operation, other rank, name, bytes) of every rank of a real step, in its order."""
    backbone = Backbone(model)
    initialise(backbone, 0)
    tokens = torch.randint(model.vocab_size, (1, SPANS[-1][1]), generator=torch.Generator().manual_seed(0))
    wires: Wires = {}
    clocks = [ClockedExchange(TurnExchange(wires, rank, len(SPANS)), rank) for rank in range(len(SPANS))]
    losses = []
    for rank, (start, stop) in enumerate(SPANS):
        context = ranked_context(len(SPANS), rank, start, clocks[rank])
        losses.append(token_losses(backbone(tokens[:, start:stop], context), tokens[:, start:stop])[0])
    for loss in reversed(losses):
        loss.backward()
    return [
        [
            (one.operation, one.to if one.operation == "send" else one.source, one.name, one.bytes)
            for one in clock.messages
        ]
        for clock in clocks
    ]


def messages(program: Program) -> list[tuple[str, int, str]]:
    found = []
    for step in program:
        if isinstance(step, Send):
            found.append(("send", step.to, step.name))
        elif isinstance(step, Receive):
            found.append(("receive", step.source, step.name))
    return found


@pytest.mark.parametrize("kind", ["kvm", "rwkv7"])
def test_modelled_ranks_send_and_receive_in_the_order_of_the_layers(kind: str) -> None:
    model = TINY.model_copy(update={"layers": [kind]})
    relay = kvm_relay if kind == "kvm" else rwkv7_relay
    for program, log in zip(relay(H200, model, SPANS), logged(model), strict=True):
        expected = [one[:3] for one in log if "first_shift" not in one[2]]
        assert messages(program) == expected


def test_modelled_messages_of_slots_have_the_bytes_of_the_real_ones() -> None:
    model = TINY.model_copy(update={"layers": ["kvm"]})
    for program, log in zip(kvm_relay(H200, model, SPANS), logged(model), strict=True):
        sizes = {step.name: step.bytes for step in program if isinstance(step, Send)}
        real = {name: size for operation, _, name, size in log if operation == "send"}
        for name in real:
            if name.endswith(("keys", "values", "slots.gradient")):  # float32 whatever the model's dtype
                assert sizes[name] == real[name]


def test_head_groups_split_messages_and_not_bytes() -> None:
    model = language_model("kvm")
    spans = [(0, 8192), (8192, 16384)]
    one, four = (kvm_relay(H200, model, spans, groups) for groups in (1, 4))

    def sent(programs: list[Program]) -> tuple[int, int]:
        sends = [step for step in programs[0] if isinstance(step, Send) and "kvm.keys" in step.name]
        return len(sends), sum(step.bytes for step in sends)

    assert sent(four) == (4 * sent(one)[0], sent(one)[1])


def test_one_rank_alone_does_the_sum_of_its_work() -> None:
    model = language_model("kvm")
    (program,) = kvm_relay(H200, model, [(0, 16_384)])
    timeline = replay([program], H200)
    assert timeline.seconds == pytest.approx(timeline.busy_seconds(0))
    assert messages(program) == []


def test_routing_waits_for_its_launches() -> None:
    model = language_model("kvm")
    work = kvm_work(H200, model, (16_384, 32_768), 32_768, 32)
    slower = kvm_work(replace(H200, launch_seconds=2e-5), model, (16_384, 32_768), 32_768, 32)
    assert slower.route - work.route == pytest.approx(63 * 3 * 1.5e-5)  # folds x launches x more seconds


@pytest.mark.parametrize("device", CLUSTERS)
def test_routing_fills_the_device_with_heads_or_with_slots(device: str) -> None:
    cluster = replace(CLUSTERS[device], launch_seconds=0.0)

    def seconds_of_a_head(heads: int, slots: int) -> float:
        model = language_model("kvm", FixedBudget(slots=slots))
        return kvm_work(cluster, model, (16_384, 32_768), 32_768, heads).route / heads

    assert seconds_of_a_head(4, 4096) == pytest.approx(seconds_of_a_head(32, 4096))
    assert seconds_of_a_head(1, 256) > 2 * seconds_of_a_head(32, 256)


def test_query_heads_that_share_a_state_route_and_fold_it_once() -> None:
    """With a quarter of the states, what goes with states costs a quarter, what goes with queries as much."""
    cluster, span = replace(H200, launch_seconds=0.0), (16_384, 32_768)
    model = language_model("kvm")
    shared = model.model_copy(update={"kvm": model.kvm.model_copy(update={"kv_heads": 8})})
    full, grouped = (kvm_work(cluster, one, span, 32_768, 32) for one in (model, shared))
    few = kvm_work(cluster, model, span, 32_768, 8)
    for part in ("route", "values", "share_out"):
        assert getattr(grouped, part) == pytest.approx(getattr(few, part)), part
    assert grouped.window_backward == full.window_backward
    assert few.attend < grouped.attend < full.attend
    assert few.state_backward < grouped.state_backward < full.state_backward
    assert outside(cluster, shared, 1).project < outside(cluster, model, 1).project


def test_costs_of_shards_add_up_to_the_costs_of_the_sequence() -> None:
    model = language_model("kvm")
    whole = kvm_work(H200, model, (0, 32_768), 32_768, 32)
    parts = [kvm_work(H200, model, span, 32_768, 32) for span in ((0, 8_192), (8_192, 32_768))]
    for name in ("attend", "window_backward", "state_backward"):
        assert sum(getattr(part, name) for part in parts) == pytest.approx(getattr(whole, name), rel=0.05)


def test_shards_of_equal_time_are_whole_blocks_that_shrink_as_the_state_grows() -> None:
    spans = by_seconds(H200, language_model("kvm"), 131_072, 8)
    lengths = [stop - start for start, stop in spans]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1]
    assert all(length % 256 == 0 for length in lengths)
    assert [stop for _, stop in spans[:-1]] == [start for start, _ in spans[1:]]


@pytest.mark.parametrize("device", CLUSTERS)
@pytest.mark.parametrize("tokens", [32_768, 131_072])
def test_shards_of_equal_time_are_those_of_the_weight_that_clusters_are_given(
    device: str, tokens: int
) -> None:
    path = Path(__file__).parents[2] / f"configs/cluster/{device.lower()}.yaml"
    growth_cost = yaml.safe_load(path.read_text("utf-8"))["parallel"]["growth_cost"]
    model = language_model("kvm")
    shards = sequence_shards(model, tokens, 8, growth_cost=growth_cost)
    best = by_seconds(CLUSTERS[device].with_sequences(8), model, tokens, 8)
    for (start, _), (other, _) in zip(shards.spans, best, strict=True):
        assert abs(start - other) <= max(512, 0.01 * tokens), (shards.spans, best)


def test_links_cost_what_their_bytes_and_their_place_say() -> None:
    cluster = replace(H200, node_bytes=100.0, node_total_bytes=200.0, node_latency=1.0)
    cluster = replace(cluster, network_bytes=10.0, network_latency=2.0)
    assert (cluster.wire_seconds(0, 7, 50), cluster.latency_seconds(0, 7)) == (0.5, 1.0)
    assert (cluster.wire_seconds(7, 8, 50), cluster.latency_seconds(8, 7)) == (5.0, 2.0)
    assert cluster.all_to_all_seconds(1, 800) == 0
    assert cluster.all_to_all_seconds(8, 800) == 800 * 7 / 8 / 200 + 1
    assert cluster.all_to_all_seconds(16, 800) == 800 * 8 / 16 / 10 + 2
    assert cluster.ring_seconds(16, 800) == 82


def test_every_assumed_constant_is_halved_and_doubled_and_nothing_else() -> None:
    found = list(variations(H200))
    assert [(constant, factor) for constant, factor, _ in found] == [
        (c, f) for c in ASSUMED for f in (0.5, 2)
    ]
    for constant, factor, cluster in found:
        assert getattr(cluster, constant) == factor * getattr(H200, constant)
        same = {name for name, value in vars(cluster).items() if value == getattr(H200, name)}
        assert len(vars(H200)) - len(same) == (2 if constant == "node_bytes" else 1)


def test_ulysses_needs_ranks_that_divide_the_heads_and_pays_for_eight_swaps_a_layer() -> None:
    model = language_model("full_attention").model_copy(update={"num_layers": 1})
    assert ulysses(H200, model, 32_768, 64) is None
    programs = ulysses(H200, model, 32_768, 8)
    assert programs is not None
    swap = H200.all_to_all_seconds(8, 4096 * 4096 * 2)
    timeline = replay(programs, H200)
    assert timeline.seconds - timeline.busy_seconds(0) == pytest.approx(8 * swap)


def test_a_ring_hides_its_messages_where_rounds_are_long_and_shows_them_where_they_are_short() -> None:
    model = language_model("full_attention").model_copy(update={"num_layers": 1})

    def efficiency(tokens: int) -> float:
        one, eight = (replay(ring_attention(H200, model, tokens, ranks), H200).seconds for ranks in (1, 8))
        return one / eight / 8

    assert efficiency(1_048_576) == pytest.approx(1.0)
    assert efficiency(8_192) < 0.95


def test_gathered_states_cost_more_with_every_rank() -> None:
    model = language_model("rwkv7")

    def waits(ranks: int, transition: bool) -> float:
        programs = gathered_recurrence(H200, model, 65_536, ranks, transition)
        timeline = replay(programs, H200)
        one = replay(gathered_recurrence(H200, model, 65_536, 1, transition), H200)
        return timeline.seconds - one.seconds / ranks

    assert waits(1, True) == waits(1, False) == 0
    for fewer, more in pairwise((8, 16, 64)):
        assert waits(fewer, True) < waits(more, True)
        assert waits(more, False) < waits(more, True)


@pytest.mark.parametrize("split", [kvm_by_routes, kvm_by_heads])
def test_two_levels_fit_together_and_share_the_work_of_one_rank(split: Any) -> None:
    model = language_model("kvm").model_copy(update={"num_layers": 2})
    cluster: Cluster = replace(H200, node_ranks=2, launch_seconds=0.0)
    spans = by_seconds(cluster, model, 16_384, 4 if split is kvm_by_routes else 2)
    timeline = replay(split(cluster, model, spans), cluster)
    assert len(timeline.ends) == 4
    one = replay(kvm_relay(cluster, model, [(0, 16_384)]), cluster).seconds
    assert one / 4 < timeline.seconds < one / 2


def test_the_table_holds_every_method_and_no_efficiency_above_one() -> None:
    told: list[str] = []
    rows = extrapolate((32_768,), (8,), told.append)
    assert len(told) == len(METHODS) * len(CLUSTERS)
    cells = sum(len(one.accumulations) for one in METHODS)
    assert len(rows) == len(SEQUENCES) * len(CLUSTERS) * cells
    assert {row.method for row in rows} == {one.name for one in METHODS}
    for row in rows:
        assert row.efficiency is not None
        assert 0 < row.efficiency <= 1 + 1e-9, row
        assert row.as_json()["efficiency"] == row.efficiency


@pytest.mark.parametrize("name", [WAVE, BY_HEADS])
def test_turns_gain_pairs_gain_more_and_more_micro_batches_in_one_direction_do_not(name: str) -> None:
    def efficiency(accumulation: Accumulation) -> float:
        (row,) = _rows(replace(H200, node_ranks=4), method(name), 32_768, (8,), 1, accumulation)
        assert row.efficiency is not None
        return row.efficiency

    one, several, in_turns = map(efficiency, (ONE, Accumulation(IN_TURNS.micro_batches), IN_TURNS))
    assert several == pytest.approx(one, abs=0.001)
    assert one + 0.004 < in_turns < efficiency(IN_PAIRS) < 1
    more_pairs = efficiency(replace(IN_PAIRS, micro_batches=2 * IN_PAIRS.micro_batches))
    assert more_pairs == pytest.approx(efficiency(IN_PAIRS), abs=0.001)


def test_one_of_each_node_stands_for_all() -> None:
    model = language_model("kvm").model_copy(update={"num_layers": 2})
    cluster = replace(H200, node_ranks=2)
    programs = kvm_by_heads(cluster, model, by_seconds(cluster, model, 16_384, 3))
    few = replay(one_of_each_node(programs[::2], 2), replace(cluster, node_ranks=1))
    assert [end for end in few.ends for _ in range(2)] == replay(programs, cluster).ends


@pytest.mark.parametrize("nodes", [2, 3])
def test_one_of_each_node_stands_for_all_of_a_pair(nodes: int) -> None:
    model = language_model("kvm").model_copy(update={"num_layers": 2})
    cluster = replace(H200, node_ranks=2)
    programs = kvm_by_heads(cluster, model, by_seconds(cluster, model, 16_384, nodes))
    every = replay(accumulated(programs, IN_PAIRS, node_ranks=2), cluster)
    first = one_of_each_node(programs[::2], 2)
    few = replay(accumulated(first, IN_PAIRS), replace(cluster, node_ranks=1))
    assert [end for end in few.ends for _ in range(2)] == every.ends


@pytest.mark.parametrize("build", [kvm_relay, partial(kvm_by_heads, members=1)])
def test_the_head_and_the_loss_end_the_forward(build: Any) -> None:
    model = language_model("kvm").model_copy(update={"num_layers": 2})
    cluster = replace(H200, node_ranks=1)
    for program in accumulated(build(cluster, model, [(0, 8_192), (8_192, 16_384)]), IN_PAIRS):
        work = [step for step in program if isinstance(step, Work)]
        *_, last_loss = (place for place, step in enumerate(work) if step.name == "loss")
        assert {step.phase for step in work[: last_loss + 1]} == {"forward"}
        assert {step.phase for step in work[last_loss + 1 :]} == {"backward"}


@pytest.mark.parametrize("device", CLUSTERS)
def test_shards_of_pairs_are_those_of_the_weight_that_clusters_are_given(device: str) -> None:
    path = Path(__file__).parents[2] / f"configs/cluster/{device.lower()}.yaml"
    assert yaml.safe_load(path.read_text("utf-8"))["parallel"]["growth_cost"] == GROWTH_COST


def test_headlines_run_and_react_to_their_constants() -> None:
    one = HEADLINES[0]
    rows = sensitivities(HEADLINES[:1], lambda _: None)
    assert len(rows) == 2 * len(ASSUMED) * len(CLUSTERS)
    found = {(row.device, row.constant, row.factor): row.efficiency for row in rows}
    slow, fast = (found["H200", ASSUMED["float32_flops"], factor] for factor in (0.5, 2.0))
    assert slow < fast
    assert method(one.method).timeline(H200, one.tokens, one.ranks) is not None


def test_headlines_are_cells_of_the_table_and_some_of_them_are_varied() -> None:
    assert len({one.label for one in HEADLINES}) == len(HEADLINES)
    for one in HEADLINES:
        assert one.tokens in LENGTHS
        assert one.ranks in RANKS
        assert one.tokens <= SEQUENCES[one.sequences]
        assert one.accumulation in method(one.method).accumulations
    assert [(one.method, one.tokens, one.sequences, one.accumulation) for one in VARIED] == [
        (WAVE, 32_768, 8, ONE),
        (WAVE, 32_768, 8, IN_TURNS),
        (WAVE, 32_768, 8, IN_PAIRS),
        (BY_HEADS, 32_768, 8, ONE),
        (BY_HEADS, 131_072, 8, ONE),
        (BY_HEADS, 131_072, 8, IN_TURNS),
        (BY_HEADS, 131_072, 8, IN_PAIRS),
        (BY_HEADS_GROUPED, 131_072, 16, IN_PAIRS),
    ]


def test_a_sequence_of_many_costs_its_share_of_a_batch_of_heads() -> None:
    model = language_model("kvm")
    span = (16_384, 32_768)
    shared = kvm_work(H200.with_sequences(4), model, span, 32_768, 8)
    batch = kvm_work(H200, model, span, 32_768, 4 * 8)
    assert 4 * shared.route == pytest.approx(batch.route)
    assert 4 * shared.share_out == pytest.approx(batch.share_out)
    assert 4 * shared.attend == pytest.approx(batch.attend)
