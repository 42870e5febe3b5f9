"""The order of what a rank of a node computes, sends and swaps; what swaps cost and what hides them."""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from kvm_dist.bench.scaling.cluster import CLUSTERS
from kvm_dist.bench.scaling.cuts import by_seconds
from kvm_dist.bench.scaling.extrapolate import language_model
from kvm_dist.bench.scaling.opponents import ulysses
from kvm_dist.bench.scaling.program import Begin, End, Program, Receive, Send, Step, Work
from kvm_dist.bench.scaling.relays import edge_bytes
from kvm_dist.bench.scaling.replay import replay
from kvm_dist.bench.scaling.two_level import kvm_by_heads, kvm_by_routes
from kvm_dist.bench.scaling.uncollected import uncollected
from kvm_dist.bench.scaling.work import (
    BACKWARD_FACTOR,
    ELEMENT_BYTES,
    MIXER_WIDTHS,
    PROJECTED_BEFORE,
    outside,
)
from models.kinds.attention import projection_flops

H200 = CLUSTERS["H200"]
KVM = language_model("kvm").model_copy(update={"num_layers": 2})
NODES = ((0, 8_192), (8_192, 16_384), (16_384, 24_576))
ROW_BYTES = KVM.hidden_size * ELEMENT_BYTES

FORWARD = """
project
finish key, pack, start node.key
finish value, pack, start node.value
finish query, pack, start node.query
land node.key, unpack, land node.value, unpack
send window, receive window
receive keys, route, send keys
receive keys, route, send keys
receive values, values, send values
receive values, values, send values
land node.query, unpack, attend
pack, start node.outputs, land node.outputs, unpack
feed-forward
"""
BACKWARD = """
feed-forward
pack, start node.outputs gradient, land node.outputs gradient, unpack
attend, send window.gradient, attend
pack, start node.query gradient
receive window.gradient
receive slots.gradient, share out, send slots.gradient
receive slots.gradient, share out, send slots.gradient
send share, receive share
pack, start node.value gradient
pack, start node.key gradient
land node.query gradient, unpack, project
land node.value gradient, unpack, project
land node.key gradient, unpack, project
"""


def named(steps: str, groups: int) -> list[str]:
    """Of a middle node. Lines that stand there twice are of the second group."""
    lines = steps.strip().splitlines()
    if groups == 1:
        lines = list(dict.fromkeys(lines))
    return [name for line in lines for name in line.split(", ")]


def order(program: Sequence[Step], layer: int) -> Iterator[str]:
    """Names of steps, without what those of a layer have in common."""
    for step in program:
        if isinstance(step, Work):
            if step.layer == layer:
                yield step.name
            continue
        verb = {Send: "send", Receive: "receive", Begin: "start", End: "land"}[type(step)]
        if (name := step.name.removeprefix(f"{layer}.kvm.")) != step.name:
            yield f"{verb} {name}"


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("node", [0, 1, 2])
def test_members_start_swaps_before_they_need_them_and_land_them_when_they_do(
    node: int, layer: int, groups: int
) -> None:
    """Forward from node to node, backward in reverse; what an outer node has no partner for is left out."""
    lacking = {
        0: ("receive window", "receive keys", "receive values"),
        1: (),
        2: ("send window", "send keys", "send values", "values"),
    }[node]
    lacking_back = {
        0: ("send window.gradient", "send slots.gradient", "send share"),
        1: (),
        2: ("receive window.gradient", "receive slots.gradient", "receive share"),
    }[node]
    expected = [one for one in named(FORWARD, groups) if one not in lacking]
    expected += [one for one in named(BACKWARD, groups) if one not in lacking_back]
    programs = kvm_by_heads(H200, KVM, NODES, groups)
    for program in programs[8 * node : 8 * (node + 1)]:
        assert list(order(program, layer)) == expected


def test_swaps_have_names_of_their_own() -> None:
    cluster = replace(H200, node_ranks=1)
    for program in (*kvm_by_heads(cluster, KVM, NODES), *kvm_by_routes(cluster, KVM, NODES)):
        begun = [step.name for step in program if isinstance(step, Begin)]
        assert len(begun) == len(set(begun)) > 0


def copied(program: Program) -> list[float]:
    """Seconds of what a rank packs and unpacks."""
    return [step.seconds for step in program if isinstance(step, Work) and step.name in ("pack", "unpack")]


def test_swaps_are_read_and_written_once_on_either_side() -> None:
    """Of keys, values, queries and outputs, and of their gradients, every layer."""
    once = 2 * 1_024 * ROW_BYTES / H200.memory_bytes
    by_heads = kvm_by_heads(H200, KVM, NODES)[0]
    assert copied(by_heads) == pytest.approx([once] * (8 * 2 * KVM.num_layers))
    model = language_model("full_attention").model_copy(update={"num_layers": 2})
    whole, parts = ulysses(H200, model, 8_192, 1), ulysses(H200, model, 8_192, 8)
    assert whole is not None
    assert parts is not None
    assert copied(whole[0]) == []
    assert copied(parts[0]) == pytest.approx([once] * (8 * 2 * model.num_layers))


def test_splitting_routes_packs_keys_and_values_and_states() -> None:
    cluster = replace(H200, node_ranks=2)
    spans = [(rank * 4_096, (rank + 1) * 4_096) for rank in range(4)]
    tokens = 2 * (2 * 4_096 * ROW_BYTES) / H200.memory_bytes
    for (start, _), program in zip(spans, kvm_by_routes(cluster, KVM, spans), strict=True):
        edge = edge_bytes(KVM, start) if start else {}
        states = 2 * (edge.get("kvm.keys", 0) + edge.get("kvm.values", 0)) / H200.memory_bytes
        assert copied(program) == pytest.approx([tokens, tokens, states, states] * KVM.num_layers)


def test_keys_and_values_that_heads_share_are_swapped_once() -> None:
    shared = KVM.model_copy(update={"kvm": KVM.kvm.model_copy(update={"kv_heads": 8})})
    cluster = replace(H200, node_latency=0.0)
    one, few = (
        {
            step.name: step.seconds
            for step in kvm_by_heads(cluster, model, NODES)[0]
            if isinstance(step, Begin)
        }
        for model in (KVM, shared)
    )
    for name in ("key", "value", "key gradient", "value gradient"):
        assert few[f"0.kvm.node.{name}"] == pytest.approx(one[f"0.kvm.node.{name}"] / 4)
    for name in ("query", "outputs", "query gradient", "outputs gradient"):
        assert few[f"0.kvm.node.{name}"] == one[f"0.kvm.node.{name}"]


def test_finishing_is_a_part_of_projecting() -> None:
    tokens = 4_096
    found = outside(H200, KVM, tokens)
    products = tokens * projection_flops(KVM, None) / H200.matrix_flops
    moved = MIXER_WIDTHS * tokens * KVM.hidden_size * ELEMENT_BYTES / H200.memory_bytes
    assert MIXER_WIDTHS == 24
    assert found.project == PROJECTED_BEFORE * products + moved
    parts = (found.unfinished, found.finish_query, found.finish_key, found.finish_value)
    assert sum(parts) == pytest.approx(found.project, rel=1e-12)
    assert found.finish_query == found.finish_key == 2 * found.finish_value
    rest = moved - (found.finish_query + found.finish_key + found.finish_value)
    assert rest == pytest.approx(found.finish_value), "the norm before moves what shifting the values does"


def test_members_project_as_long_as_ranks_of_a_chain() -> None:
    beside = outside(H200, KVM, 1_024)
    (program,) = kvm_by_heads(H200, KVM, NODES[:1], members=1)
    before, after = (
        sum(
            step.seconds
            for step in program
            if isinstance(step, Work)
            and step.phase == phase
            and (step.name == "project" or step.name.startswith("finish"))
        )
        for phase in ("forward", "backward")
    )
    assert before == pytest.approx(KVM.num_layers * beside.project)
    assert after == pytest.approx(KVM.num_layers * BACKWARD_FACTOR * beside.project)


@pytest.mark.parametrize("device", CLUSTERS)
def test_only_swaps_of_outputs_are_waited_for(device: str) -> None:
    """The others are shorter than what is computed beside them."""
    cluster = CLUSTERS[device].with_sequences(8)
    spans = by_seconds(cluster, KVM, 32_768, 1)
    timeline = replay(kvm_by_heads(cluster, KVM, spans), cluster)
    swap = cluster.all_to_all_seconds(8, 4_096 * ROW_BYTES)
    for rank in range(8):
        waited = timeline.ends[rank] - timeline.busy_seconds(rank)
        assert waited == pytest.approx(KVM.num_layers * 2 * swap)


def test_slow_links_are_waited_for() -> None:
    cluster = replace(H200, node_total_bytes=H200.node_total_bytes / 1e3)
    timeline = replay(kvm_by_heads(cluster, KVM, NODES[:1]), cluster)
    swaps = KVM.num_layers * 8 * cluster.all_to_all_seconds(8, 1_024 * ROW_BYTES)
    waited = timeline.seconds - timeline.busy_seconds(0)
    assert swaps - timeline.busy_seconds(0) < waited < swaps


def test_groups_of_a_member_split_its_messages_and_not_their_bytes() -> None:
    one, two = (kvm_by_heads(H200, KVM, NODES, groups)[8] for groups in (1, 2))

    def sent(program: Program, name: str) -> list[int]:
        return [step.bytes for step in program if isinstance(step, Send) and step.name == f"0.kvm.{name}"]

    for name in ("keys", "values", "slots.gradient"):
        (whole,) = sent(one, name)
        assert sent(two, name) == [whole // 2] * 2
    for name in ("window", "window.gradient", "share"):
        assert sent(two, name) == sent(one, name)


def test_programs_of_some_members_are_those_of_all() -> None:
    every = kvm_by_heads(H200, KVM, NODES)
    assert kvm_by_heads(H200, KVM, NODES, members=1) == every[::8]


def failing() -> None:
    with uncollected():
        assert not gc.isenabled()
        raise ValueError("no link")


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was(enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ValueError, match="no link"):
            failing()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
