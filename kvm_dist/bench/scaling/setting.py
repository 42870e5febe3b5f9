"""What `bench scaling` runs: the model, the sequence, the ranks, how often. Imports no torch."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from kvm_dist.config import RunConfig

# whole: one rank trains the whole sequence; alone: every process runs the sequence ranks one after another;
# together: sequence ranks train it, as in a real run; heads: as one node, whose members split KVM by heads;
# pairs: a step of two sequences, one from either end of the ranks at the same time.
Task = Literal["whole", "alone", "together", "heads", "pairs"]


@dataclass(frozen=True)
class Setting:
    """One bench. The model is small and the sequence long, as many cores as ranks, one thread each."""

    tokens: int = 16_384
    ranks: int = 2
    layers: tuple[str, ...] = ("kvm", "rwkv7")
    num_layers: int = 4
    hidden_size: int = 256
    heads: int = 4
    vocab_size: int = 256
    chunk: int = 256
    slots_per_root: float = 16.0  # slots of the state: this times the root of the tokens
    zero_stage: int = 1
    shards: str = "balanced"
    steps: int = 3  # timed, after one that warms up
    timeout_seconds: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise ValueError(f"ranks={self.ranks}: want at least 2, there is nothing to share otherwise")
        if self.steps < 1:
            raise ValueError(f"steps={self.steps}: want at least 1")

    def task_config(self, task: Task) -> RunConfig:
        """The run whose steps a task times."""
        if task == "whole":
            return self.run_config(data=1, sequence=1)
        if task == "together":
            return self.run_config(data=1, sequence=self.ranks)
        if task == "heads":
            return self.run_config(data=1, sequence=self.ranks, head_parallel=self.ranks)
        if task == "pairs":
            return self.run_config(data=1, sequence=self.ranks, accumulation=2, two_way_chain=True)
        return self.run_config(data=self.ranks, sequence=1, accumulation=self.ranks)

    def run_config(self, data: int, sequence: int, accumulation: int = 1, **parallel_too: Any) -> RunConfig:
        """A run on data x sequence ranks; parallel_too: more of `parallel`. Raises ValueError if it cannot
        be."""
        model: dict[str, Any] = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_layers": self.num_layers,
            "num_heads": self.heads,
            "layers": list(self.layers),
            "kvm": {"chunk": self.chunk, "budget": self._budget()},
            "rwkv7": {"head_dim": self.hidden_size // self.heads},
        }
        parallel: dict[str, Any] = {
            "data": data,
            "sequence": sequence,
            "zero_stage": self.zero_stage,
            "shards": self.shards,
            "threads_per_rank": 1,
            "timeout_seconds": self.timeout_seconds,
            **parallel_too,
        }
        given: dict[str, Any] = {
            "name": "bench-scaling",
            "device": "cpu",
            "seed": self.seed,
            "model": model,
            "parallel": parallel,
            "data": {"sequence_length": self.tokens},
            "train": {"steps": 1000, "batch_sequences": data * accumulation, "accumulation": accumulation},
            "schedule": {"warmup_steps": 0},
        }
        return RunConfig.model_validate(given)

    def _budget(self) -> dict[str, Any]:
        return {"kind": "power_law", "factor": self.slots_per_root, "minimum": self.chunk}


QUICK = replace(Setting(), tokens=2_048, num_layers=2, hidden_size=128, heads=2, chunk=64, steps=2)
