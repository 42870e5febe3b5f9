"""What a run says of itself at its start."""

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvm_dist.config import RunConfig
from kvm_dist.train import announce
from parallel.config import ParallelConfig
from tests.models.tiny import tiny_model

WORDS = "gradients end at the edges between the 2 shards of a sequence"


@pytest.mark.parametrize(
    ("parallel", "told"),
    [
        (ParallelConfig(sequence=2), False),
        (ParallelConfig(sequence=2, truncate_gradients=True), True),
        (ParallelConfig(truncate_gradients=True), False),
    ],
    ids=["whole gradients", "truncated", "one rank"],
)
def test_truncated_gradients_are_told_and_nothing_else_is(
    parallel: ParallelConfig, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    world: Any = SimpleNamespace(rank=0, device="cpu")
    engine: Any = SimpleNamespace(describe=lambda: {"dtype": "float32"})
    with caplog.at_level(logging.INFO):
        announce(world, RunConfig(parallel=parallel), tiny_model(["kvm"]), cast(Any, engine), None)
    assert (WORDS in caplog.text) == told
