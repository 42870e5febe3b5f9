"""The shipped quickstarts, made tiny, train to the same losses on two processes and on four."""

from pathlib import Path

import pytest

from kvm_dist.agreement import on_rank_zero
from kvm_dist.counters import Counters
from kvm_dist.data.first_use import ensure_prepared
from kvm_dist.load import load_config
from kvm_dist.run_parts import batch_stream, build_engine, sequence_split
from kvm_dist.step import StepOutcome, TrainStep
from parallel.mesh import Mesh
from parallel.world import World
from tests.launch.tiny_run import write_corpus
from tests.support.ranks import Ranks

CONFIGS = Path(__file__).parents[2] / "configs"
STEPS, TOKENS = 3, 333
SMALL = (
    "model.hidden_size=32",
    "model.head_dim=16",
    "model.base_width=32",
    "model.kvm.chunk=16",
    "model.kvm.budget.minimum=16",
    "model.rwkv7.head_dim=16",
    f"data.sequence_length={TOKENS}",
    "train.batch_sequences=4",
    "schedule.warmup_steps=1",
    "optimizer.eps=1e-2",  # or the first updates are signs of gradients, rounding errors included
)


def train_steps(world: World, name: str, folder: str) -> list[StepOutcome]:
    overrides = [*SMALL, f"data.path={folder}/data", f"data.source={folder}/text"]
    config = load_config(CONFIGS / f"{name}.yaml", overrides).config
    mesh = Mesh.build(world, config.parallel)
    index = on_rank_zero(world, lambda: ensure_prepared(config.data, config.model.vocab_size, progress=False))
    _, groups, engine = build_engine(config, world)
    step = TrainStep(config, engine, groups, sequence_split(config, mesh))
    batches = iter(batch_stream(config, mesh, index, Counters()))
    return [step(next(batches).micro_batches, number, stop_requested=False) for number in range(STEPS)]


def test_two_processes_and_four_train_to_the_same_losses(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    outcomes = []
    for name, size in (("quickstart", 2), ("quickstart-2x2", 4)):
        with Ranks(size) as ranks:
            outcomes.append(ranks.run(train_steps, name, str(tmp_path)))
    two, four = outcomes
    for rank in four:
        assert rank[0].gradient_norm == pytest.approx(two[0][0].gradient_norm, rel=1e-6)
        for one, other in zip(two[0], rank, strict=True):
            assert other.loss == pytest.approx(one.loss, rel=1e-6)
            assert other.tokens == one.tokens == 4 * TOKENS
    assert two[0][-1].loss < two[0][0].loss
