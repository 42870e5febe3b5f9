"""Every message of a step is one that the closed forms list: name, order, bytes."""

import copy
import subprocess
import sys
from collections.abc import Iterable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from models.backbone import Backbone
from models.budget import Budget, FixedBudget, PowerLawBudget, SaturatingBudget
from models.config import (
    BlockWindowConfig,
    KVMConfig,
    ModelConfig,
    OVQConfig,
    RWKV7Config,
    SlidingWindowConfig,
)
from models.costs import model_costs
from models.loss import token_losses
from models.messages import EdgeMessage, edge_messages, head_swaps
from parallel.mesh import Mesh
from parallel.sequence.context import Exchange, HeadSplit
from parallel.sequence.ranks import RankedSequence
from parallel.sequence.recorded import Message, Operation, Phase, RecordedExchange, longest_chain
from tests.models.tiny import HYBRID, RECURRENCES, SIMPLER_RECURRENCES, tiny_batch, tiny_config, tiny_model
from tests.support.logical_all_to_all import LogicalRow
from tests.support.logical_ranks import run_logical_ranks

KINDS = ["kvm", "rwkv7", "sliding_window", "block_window", "ovq", *RECURRENCES]  # of a bounded size
MIB = 2**20
BATCH = 2
Listed = list[tuple[str, int | None, int]]


def logs_of_a_step(
    model: Backbone, bounds: list[int], batch: int, head_groups: int
) -> tuple[list[list[Message]], list[list[tuple[str, int]]]]:
    """What every rank of one forward and backward logged: its messages, and its swaps' names and bytes.

    Rank r holds tokens [bounds[r], bounds[r + 1]).
    """
    ids, labels = tiny_batch(bounds[-1], batch)
    spans = list(pairwise(bounds))
    row = LogicalRow(len(spans))
    swaps = [row.rank(rank) for rank in range(len(spans))]

    def step(rank: int, exchange: Exchange) -> list[Message]:
        part, own = slice(*spans[rank]), copy.deepcopy(model)
        recorded = RecordedExchange(exchange, rank)
        mesh = cast(Mesh, SimpleNamespace(sequence_rank=rank))
        split = HeadSplit(head_groups)
        context = RankedSequence(mesh, bounds[rank], recorded, spans, swaps[rank], split)
        logits = own(ids[:, part], context)
        token_losses(logits, labels[:, part])[0].backward()
        return recorded.messages

    return run_logical_ranks(len(spans), step), [swap.sent for swap in swaps]


def listed(messages: Iterable[EdgeMessage], phase: Phase, element_bytes: int, batch: int) -> Listed:
    found = [one for one in messages if one.phase == phase]
    return [(one.name, one.layer, one.size(element_bytes, batch)) for one in found]


def logged(log: list[Message], operation: Operation, phase: Phase) -> Listed:
    found = [one for one in log if (one.operation, one.phase) == (operation, phase)]
    return [(one.name, one.layer, one.bytes) for one in found]


def assert_as_listed(model: Backbone, bounds: list[int], batch: int = BATCH, head_groups: int = 1) -> None:
    logs, swaps = logs_of_a_step(model, bounds, batch, head_groups)
    spans = list(pairwise(bounds))
    element_bytes = next(model.parameters()).element_size()
    for rank, (start, stop) in enumerate(spans):
        before = [] if rank == 0 else [start]
        after = [] if stop == bounds[-1] else [stop]
        wanted: dict[tuple[Operation, Phase], list[int]] = {
            ("receive", "forward"): before,
            ("send", "forward"): after,
            ("receive", "backward"): after,
            ("send", "backward"): before,
        }
        for (operation, phase), edges in wanted.items():
            crossing = [
                one for edge in edges for one in edge_messages(model.config, edge, spans, head_groups)
            ]
            messages = listed(crossing, phase, element_bytes, batch)
            assert logged(logs[rank], operation, phase) == messages, (rank, operation, phase)
        swapped = head_swaps(model.config, spans, rank)
        assert swaps[rank] == [(one.name, one.size(element_bytes, batch)) for one in swapped]
    assert longest_chain(logs) == 2 * (len(bounds) - 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [*KINDS, *SIMPLER_RECURRENCES, "full_attention"])
def test_every_kind_sends_what_is_listed_in_either_precision(kind: str, dtype: torch.dtype) -> None:
    assert_as_listed(tiny_model([kind, kind]).to(dtype), [0, 32, 128, 149])


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("layers", [["ovq", "rwkv7", "block_window", "rwkv7"], HYBRID], ids=str)
def test_mixed_layers_send_what_is_listed_over_any_number_of_ranks(layers: list[str], ranks: int) -> None:
    assert_as_listed(tiny_model(layers), [*range(0, 32 * ranks, 32), 32 * ranks - 5], batch=1)


@pytest.mark.parametrize("head_groups", [2, 3, 5])
def test_states_go_in_the_groups_of_heads_that_are_listed(head_groups: int) -> None:
    model = tiny_model(["kvm", "rwkv7"], num_heads=5, head_dim=8)
    assert_as_listed(model, [0, 32, 128, 149], batch=1, head_groups=head_groups)


def test_all_kinds_over_64_ranks_send_what_is_listed() -> None:
    model = tiny_model(KINDS, hidden_size=16, base_width=16)
    assert_as_listed(model, list(range(0, 65 * 32, 32)), batch=1)


@pytest.mark.parametrize(
    "changes",
    [
        {"token_shift": False},
        {"value_residual": False},
        {"activation_checkpointing": True},
        {"head_dim": 24},
        {"kvm": KVMConfig(chunk=16, window_chunks=1, budget=FixedBudget(slots=24))},
        {"kvm": KVMConfig(chunk=16, window_chunks=3, budget=SaturatingBudget(limit=40))},
        {"kvm": KVMConfig(chunk=16, window_chunks=6, merge_gate=False, sinks=0, max_slots=20)},
        {"block_window": BlockWindowConfig(chunk=8, window_chunks=1, sinks=0)},
        {
            "block_window": BlockWindowConfig(chunk=8, window_chunks=15, sinks=3),
            "sliding_window": SlidingWindowConfig(window=200),
        },
        {"ovq": OVQConfig(chunk=8, max_centroids=1)},
    ],
    ids=str,
)
def test_settings_change_what_is_sent_and_listed_alike(changes: dict[str, Any]) -> None:
    assert_as_listed(tiny_model(KINDS, **changes), [0, 96, 128, 221], batch=1)


@pytest.mark.parametrize("edge", [8, 32, 96, 160])
def test_the_list_adds_up_to_the_costs(edge: int) -> None:
    config = tiny_config([*KINDS, *KINDS])
    for layer in model_costs(config, edge, element_bytes=2).layers:
        forward = [m for m in edge_messages(config, edge) if (m.layer, m.phase) == (layer.index, "forward")]
        assert sum(one.size(2) for one in forward) == layer.boundary_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_full_attention_swaps_the_heads_that_are_listed(dtype: torch.dtype) -> None:
    model = tiny_model(["full_attention", "rwkv7", "full_attention"], num_heads=6, head_dim=4)
    assert_as_listed(model.to(dtype), [0, 32, 128, 149])


def test_full_attention_without_the_spans_of_all_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"an edge at 32 needs the spans of all ranks; got \(\)"):
        edge_messages(tiny_config(["full_attention"]), 32)


def paper_layer(kind: str, budget: Budget) -> ModelConfig:
    """One layer of 32 heads of 128 with the paper's chunks."""
    return ModelConfig(
        hidden_size=4096,
        num_layers=1,
        num_heads=32,
        layers=[kind],
        kvm=KVMConfig(budget=budget),
        rwkv7=RWKV7Config(head_dim=64),
    )


def parts(config: ModelConfig, edge: int, phase: Phase = "forward") -> dict[str, int]:
    """Bytes by the last word of the name, bfloat16 activations."""
    found: list[EdgeMessage] = [one for one in edge_messages(config, edge) if one.phase == phase]
    return {one.name.split(".", 2)[2]: one.size(2) for one in found if ".feed_forward." not in one.name}


@pytest.mark.parametrize(
    ("tokens", "ranks", "fixed", "square_root"),
    [(2**15, 8, 8, 46), (2**17, 8, 8, 89), (2**20, 8, 8, 244), (2**20, 64, 8, 259)],
)
def test_a_kvm_layer_hands_over_the_mebibytes_of_the_design(
    tokens: int, ranks: int, fixed: int, square_root: int
) -> None:
    """The design's table counts two bytes a number of the state, of which four are sent, and the slots of
    the last whole block before the edge."""
    edge = tokens - tokens // ranks
    for budget, wanted in ((FixedBudget(slots=256), fixed), (PowerLawBudget(), square_root)):
        sent = parts(paper_layer("kvm", budget), edge - 256)
        assert round(((sent["keys"] + sent["values"]) / 2 + sent["window"]) / MIB) == wanted


@pytest.mark.parametrize(("edge", "slots"), [(28672, 2709), (114688, 5418), (917504, 15325)])
def test_a_kvm_layer_hands_over_float32_slots_and_a_window_in_the_model_s_dtype(
    edge: int, slots: int
) -> None:
    sent = parts(paper_layer("kvm", PowerLawBudget()), edge)
    assert sent == {
        "shift": 2 * 3 * 4096,
        "window": 2 * 256 * 32 * 257,  # 4.016 MiB
        "keys": 4 * slots * 32 * 128,
        "values": 4 * slots * 32 * 129,
    }


def test_a_kvm_layer_s_gradients_are_float32_and_those_of_the_window_come_twice() -> None:
    sent = parts(paper_layer("kvm", FixedBudget(slots=256)), 2**15, "backward")
    assert sent == {
        "window.gradient": 4 * 256 * 32 * 256,
        "slots.gradient": 4 * 256 * 32 * 257,
        "share": 4 * 256 * 32 * 257,
        "shift gradient": 2 * 3 * 4096,
    }


@pytest.mark.parametrize("edge", [28672, 2**20])
def test_an_rwkv7_layer_hands_over_one_mebibyte_at_any_length(edge: int) -> None:
    sent = parts(paper_layer("rwkv7", FixedBudget()), edge)
    assert sent == {"first_shift": 2 * 4096, "shift": 2 * 4096, "state": MIB}


def test_the_list_needs_no_torch() -> None:
    code = "import sys, models.messages; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
