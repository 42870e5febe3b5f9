"""What `bench step`, `bench data` and `bench checkpoint` find. Never how long anything takes."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from kvm_dist.bench import step as bench_of_a_step
from kvm_dist.bench.blocking import Cost, measure, of_a_whole_step
from kvm_dist.bench.checkpoint import CheckpointBench, bench_checkpoint
from kvm_dist.bench.data import BATCH_SEQUENCES, bench_data
from kvm_dist.bench.step import StepBench, bench_step, one_rank
from kvm_dist.config import RunConfig
from kvm_dist.exit_codes import StorageError
from kvm_dist.plan import make_plan
from parallel.world import World
from tests.kvm_dist.data.corpus import write_folder
from tests.support.ranks import Ranks

TINY: dict[str, Any] = {
    "model": {
        "vocab_size": 256,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 2,
        "layers": ["kvm", "rwkv7"],
        "kvm": {"chunk": 16, "budget": {"kind": "power_law", "factor": 3, "minimum": 16}},
        "rwkv7": {"head_dim": 16},
    },
    "data": {"sequence_length": 96},
    "train": {"batch_sequences": 24, "accumulation": 3},
    "parallel": {"data": 2, "sequence": 2, "head_groups": 2},
}


def run_config(run_root: Path) -> RunConfig:
    return RunConfig.model_validate({**TINY, "run_root": run_root})


@pytest.fixture(scope="module")
def rank() -> Iterator[Ranks]:
    with Ranks(1) as ranks:
        yield ranks


def two_benches(world: World, config: RunConfig) -> tuple[StepBench, StepBench]:
    return bench_step(world, config, 2), bench_step(world, config, 1)


def bench_checkpoint_on_a_full_disk(world: World, config: RunConfig) -> str:
    with patch("kvm_dist.checkpoint.save.free_bytes", lambda _: 17), pytest.raises(StorageError) as caught:
        bench_checkpoint(world, config, 1)
    return str(caught.value)


def phases_by_a_clock_that_ticks_when_read(world: World, config: RunConfig) -> dict[str, float]:
    ticks = count()
    with patch.object(bench_of_a_step, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks)))):
        return bench_step(world, config, 1).phases


def test_one_rank_takes_a_micro_batch_of_whole_sequences(tmp_path: Path) -> None:
    alone = one_rank(run_config(tmp_path))
    assert (alone.parallel.world_size, alone.train.accumulation) == (1, 1)
    assert (alone.train.batch_sequences, alone.data.sequence_length) == (4, 96)
    assert one_rank(run_config(tmp_path), 40).data.sequence_length == 40
    assert alone.model == run_config(tmp_path).model


def test_a_step_is_told_by_phase_beside_its_plan(rank: Ranks, tmp_path: Path) -> None:
    config = one_rank(run_config(tmp_path), 40)
    ((found, again),) = rank.run(two_benches, config)
    plan = make_plan(config)
    assert (len(found.seconds), len(again.seconds)) == (2, 1)
    assert set(found.phases) == {"reduce", "forward", "backward", "optimizer"}
    assert found.tokens == 4 * 40
    assert found.flops == plan.train_flops_per_token * found.tokens
    assert found.planned_bytes == plan.memory.total
    assert found.operators == again.operators > 100
    assert found.as_json()["tokens_per_second"] == found.tokens / found.step_seconds


def test_phases_are_of_the_timed_steps_only(rank: Ranks, tmp_path: Path) -> None:
    (phases,) = rank.run(phases_by_a_clock_that_ticks_when_read, one_rank(run_config(tmp_path), 40))
    assert phases == {"reduce": 2, "forward": 1, "backward": 1, "optimizer": 1}


def test_saves_and_loads_are_measured_and_leave_nothing(rank: Ranks, tmp_path: Path) -> None:
    config = one_rank(run_config(tmp_path / "runs"))
    found: CheckpointBench
    (found,) = rank.run(bench_checkpoint, config, 2)
    assert not (tmp_path / "runs").exists()
    assert found.files == 5
    assert found.planned_bytes < found.bytes < found.planned_bytes + 200_000
    for rounds in (found.blocking, found.save, found.load, found.raw_write, found.raw_read):
        assert len(rounds) == 2
    assert set(found.as_json()) >= {"save_share", "load_share"}


def test_a_save_is_told_as_a_share_of_the_step_it_holds_up(rank: Ranks, tmp_path: Path) -> None:
    (found,) = rank.run(measure, one_rank(run_config(tmp_path), 40), 2, tmp_path)
    assert found.tokens == 4 * 40
    assert (len(found.alone), len(found.blocking), len(found.beside)) == (2, 2, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
    said = str(Cost(124_000_000, 2048, (10.0, 8.0, 10.0), (0.2, 0.8, 0.3), (11.0, 8.0, 10.0)))
    assert "holds up 3.00% of a step (0.30 s; met)" in said
    assert "takes +0.0%" in said
    assert "wanted 5%" in str(Cost(1, 1, (10.0,), (0.6,), (10.0,)))


def test_a_whole_step_has_more_tokens_and_a_rank_of_many_less_to_copy(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    cost = Cost(1, 96, (10.0,), (0.6,), (10.0,))  # 6 % of a step of one sequence
    assert (config.train.batch_sequences, config.parallel.world_size) == (24, 4)
    assert of_a_whole_step(cost, config).endswith("has 576 tokens on each of 4 ranks: by this 0.250%")


def test_a_bench_whose_save_fails_says_so(rank: Ranks, tmp_path: Path) -> None:
    (said,) = rank.run(bench_checkpoint_on_a_full_disk, one_rank(run_config(tmp_path / "runs")))
    assert "round 1 failed" in said
    assert not (tmp_path / "runs").exists()


def test_text_becomes_shards_and_shards_become_batches(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "text")
    told: list[str] = []
    found = bench_data(str(source), "bytes", 64, 3, lambda what, _: told.append(what))
    assert found.tokens == sum(path.stat().st_size for path in source.rglob("*.txt"))
    whats = [turn.what for turn in found.turns]
    assert whats[0] == "prepare, processes: 1"
    assert whats[-1].startswith("first batch of a resume")
    read = {turn.what: turn.tokens for turn in found.turns}
    assert read["check every sample"] == found.tokens
    assert read["batches after it, loader processes: 1"] == 3 * BATCH_SEQUENCES * 64
    assert told[-1] == whats[-1]
