"""A resume in another layout is taken, and said to give other bits."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvm_dist.config import RunConfig
from kvm_dist.layout_record import LAYOUT_KEY, layout_changes, layout_record, note_layout


def world(rank: int = 0) -> Any:
    return SimpleNamespace(rank=rank, device=torch.device("cpu"))


@pytest.fixture
def threads() -> Any:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_another_number_of_threads_at_a_resume_is_said(
    threads: Any, caplog: pytest.LogCaptureFixture
) -> None:
    threads(1)
    saved = {LAYOUT_KEY: layout_record(RunConfig(), world())}
    with caplog.at_level(logging.WARNING):
        note_layout(saved, layout_record(RunConfig(), world()), world())
        assert caplog.text == ""
        threads(2)
        now = layout_record(RunConfig(), world())
        note_layout(saved, now, world(rank=1))
        assert caplog.text == "", "rank 0 speaks"
        note_layout(saved, now, world())
    assert "(parallel.threads_per_rank 1 -> 2)" in caplog.text
    assert "not the same bits" in caplog.text


@pytest.mark.parametrize(
    "section",
    [
        {"parallel": {"zero_stage": 3}},
        {"parallel": {"alternate_chain": True}},
        {"parallel": {"growth_cost": 3}},
        {"train": {"accumulation": 2}},
        {"parallel": {"data": 4}},
        {"parallel": {"node_splits": "routing"}},
        {"train": {"loss_chunk": 64}},
        {"model": {"kvm": {"backend": "torch"}}},
    ],
    ids=str,
)
def test_every_part_of_a_layout_counts(section: dict[str, Any]) -> None:
    now = layout_record(RunConfig.model_validate(section), world())
    assert len(layout_changes(layout_record(RunConfig(), world()), now)) == 1


def test_ranks_that_share_heads_cut_sequences_elsewhere() -> None:
    alone, together = (
        layout_record(RunConfig.model_validate({"parallel": {"sequence": 2, "head_parallel": size}}), world())
        for size in (1, 2)
    )
    assert layout_changes(alone, together) == ["parallel.head_parallel 1 -> 2"]


def test_a_backend_counts_where_its_kind_is_in_use() -> None:
    layers = ["gated_deltanet"]
    now = {"model": {"layers": layers, "gated_deltanet": {"backend": "torch"}, "kvm": {"backend": "torch"}}}
    before, after = (
        layout_record(RunConfig.model_validate(config), world())
        for config in ({"model": {"layers": layers}}, now)
    )
    assert layout_changes(before, after) == ["model.gated_deltanet.backend auto -> torch"]


def test_a_checkpoint_that_tells_of_no_layout_is_taken_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    note_layout({}, layout_record(RunConfig(), world()), world())
    assert caplog.text == ""
