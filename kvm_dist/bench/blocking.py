"""What a save costs the steps around it: `python -m kvm_dist.bench.blocking CONFIG [key=value ...]`.

It wants a quiet machine. On one rank, random tokens; a step alone and a step that is saved take turns.
"""

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from kvm_dist.bench.step import one_rank
from kvm_dist.checkpointing import CheckpointSaver
from kvm_dist.config import CheckpointConfig, RunConfig
from kvm_dist.counters import Counters
from kvm_dist.data.loader import MicroBatch
from kvm_dist.load import dump_config, load_config
from kvm_dist.run_parts import build_engine, choose_algorithms, sequence_split
from kvm_dist.step import TrainStep
from kvm_dist.tracking import NullTracker
from parallel.engine.settings import import_deepspeed
from parallel.mesh import Mesh
from parallel.world import World, join_world, leave_world

WANTED_SHARE = 0.05  # of a step


@dataclass(frozen=True)
class Cost:
    """Seconds of every round. alone: a step; blocking: what its save holds up; beside: the step after it."""

    parameters: int
    tokens: int
    alone: tuple[float, ...]
    blocking: tuple[float, ...]
    beside: tuple[float, ...]

    @property
    def blocking_share(self) -> float:
        """Of a step, the median over rounds, each in itself."""
        return median(held / step for held, step in zip(self.blocking, self.alone, strict=True))

    @property
    def slower_beside(self) -> float:
        return median(beside / step for beside, step in zip(self.beside, self.alone, strict=True)) - 1

    def __str__(self) -> str:
        verdict = "met" if self.blocking_share <= WANTED_SHARE else f"wanted {WANTED_SHARE:.0%}"
        return (
            f"{self.parameters / 1e6:.1f}M parameters, steps of {self.tokens:,} tokens and "
            f"{median(self.alone):.2f} s: a save holds up {self.blocking_share:.2%} of a step "
            f"({median(self.blocking):.2f} s; {verdict}); the step beside its writing takes "
            f"{self.slower_beside:+.1%}"
        )


def of_a_whole_step(cost: Cost, config: RunConfig) -> str:
    """`cost` at the step of `config`: of each, a rank has its own part of the tokens and of the state."""
    ranks = config.parallel.world_size
    tokens = config.train.batch_sequences * config.data.sequence_length / ranks
    share = cost.blocking_share * cost.tokens / tokens / ranks
    return (
        f"a step of the configuration has {tokens:,.0f} tokens on each of {ranks} ranks: by this {share:.3%}"
    )


def measure(world: World, config: RunConfig, rounds: int, folder: Path) -> Cost:
    """`config` wants one rank; checkpoints go into `folder`. The first round is left out."""
    choose_algorithms(config)
    import_deepspeed(config.parallel.zero_stage, config.parallel.timeout_seconds)
    model, groups, engine = build_engine(config, world)
    step = TrainStep(config, engine, groups, sequence_split(config, Mesh.build(world, config.parallel)))
    text = dump_config(config)
    saving = CheckpointConfig(keep=1)
    saver = CheckpointSaver(
        folder, saving, engine, world, NullTracker(), config_text=text, data_digest="bench"
    )
    shape = (config.train.batch_sequences, config.data.sequence_length + 1)
    tokens = torch.randint(config.model.vocab_size, shape)
    batch = [MicroBatch(tokens[:, :-1], tokens[:, 1:])]
    times: dict[str, list[float]] = {"alone": [], "blocking": [], "beside": []}
    for number in range(rounds + 1):
        alone = step(batch, 0, stop_requested=False).seconds
        begun = time.perf_counter()
        saver.save(Counters(step=number + 1), {}, last=False)
        blocking = time.perf_counter() - begun
        beside = step(batch, 0, stop_requested=False).seconds
        saver.finish()
        if number:
            for what, seconds in (("alone", alone), ("blocking", blocking), ("beside", beside)):
                times[what].append(seconds)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Cost(parameters, batch[0].inputs.numel(), **{what: tuple(spent) for what, spent in times.items()})


def main() -> None:
    parser = argparse.ArgumentParser("kvm_dist.bench.blocking", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", help="such as parallel.precision=float32")
    parser.add_argument("--tokens", type=int, default=1024, help="of a step, one sequence")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    alone = ["train.batch_sequences=1", "train.accumulation=1", "parallel.data=1"]
    config = one_rank(load_config(options.config, [*alone, *options.overrides]).config, options.tokens)
    world = join_world(config.parallel, config.device)
    config.run_root.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".bench-", dir=config.run_root) as folder:
            cost = measure(world, config, options.rounds, Path(folder))
        print(cost)
        print(of_a_whole_step(cost, load_config(options.config, options.overrides).config))
    finally:
        leave_world()


if __name__ == "__main__":
    main()
