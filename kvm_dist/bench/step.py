"""`bench step`: the steps of a run's model on one rank, phase by phase, beside what its plan says."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvm_dist.bench.memory import forget_peak, peak_resident_bytes, resident_bytes
from kvm_dist.config import RunConfig
from kvm_dist.data.loader import MicroBatch
from kvm_dist.plan import make_plan
from kvm_dist.run_parts import build_engine, choose_algorithms, sequence_split
from kvm_dist.step import TrainStep
from parallel.engine.settings import import_deepspeed
from parallel.mesh import Mesh
from parallel.world import World

Report = Callable[[str, float], None]  # what is being done, and the share of the whole that is done

_MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
_MATMUL_ROUNDS = 7


@dataclass(frozen=True)
class StepBench:
    """tokens: of a step. seconds: of each timed step; phases: the median of each phase's seconds.

    operators: of torch that a step calls; each costs the host microseconds. flops: of a step, modelled.
    matmul_flops_per_second: of one large product in the weights' dtype. planned_bytes: what the plan says of
    this rank; peak_bytes: what it held at most, above an empty process.
    """

    name: str
    device: str
    threads: int
    layers: int
    sequences: int
    tokens: int
    seconds: tuple[float, ...]
    phases: dict[str, float]
    operators: int
    flops: float
    matmul_flops_per_second: float
    planned_bytes: int
    peak_bytes: int

    @property
    def step_seconds(self) -> float:
        return median(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds

    @property
    def floor_seconds(self) -> float:
        """If all of its arithmetic were large products."""
        return self.flops / self.matmul_flops_per_second

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "floor_seconds": self.floor_seconds,
        }


def one_rank(config: RunConfig, tokens: int | None = None) -> RunConfig:
    """A micro-batch of `config` on a rank that has no others: whole sequences, cut to `tokens` if given."""
    values = config.model_dump(mode="json")
    sequences = config.train.batch_sequences // (config.parallel.data * config.train.accumulation)
    values["train"] |= {"batch_sequences": sequences, "accumulation": 1}
    values["parallel"] |= {"data": 1, "sequence": 1, "head_groups": 1, "head_parallel": 1}
    values["data"]["sequence_length"] = tokens or config.data.sequence_length
    return RunConfig.model_validate(values)


def bench_step(world: World, config: RunConfig, steps: int, report: Report = lambda *_: None) -> StepBench:
    """Time `steps` steps of `config`, which wants one rank, on random tokens; two more warm up and count."""
    choose_algorithms(config)
    import_deepspeed(config.parallel.zero_stage, config.parallel.timeout_seconds)
    empty = _start_of_peak(world.device)
    _, groups, engine = build_engine(config, world)
    phases = _Phases(world.device)
    split = sequence_split(config, Mesh.build(world, config.parallel))
    step = TrainStep(config, engine, groups, split, phases.beat)
    batch = _random_batch(config)
    seconds = []
    for number in range(steps + 1):
        report("warming up" if number == 0 else f"step {number} of {steps}", number / (steps + 2))
        phases.begin()
        outcome = step([batch], 0, stop_requested=False)
        phases.end()
        seconds.append(outcome.seconds)
    peak = _peak(world.device) - empty
    of_phases = {name: median(spent[1:]) for name, spent in phases.seconds.items()}  # without the step below
    report("counting operators", (steps + 1) / (steps + 2))
    operators = _operators(lambda: step([batch], 0, stop_requested=False))
    plan = make_plan(config)
    return StepBench(
        name=config.name,
        device=str(world.device),
        threads=torch.get_num_threads(),
        layers=config.model.num_layers,
        sequences=config.train.batch_sequences,
        tokens=plan.tokens_per_step,
        seconds=tuple(seconds[1:]),
        phases=of_phases,
        operators=operators,
        flops=plan.train_flops_per_token * plan.tokens_per_step,
        matmul_flops_per_second=matmul_flops_per_second(world.device, config.parallel.precision),
        planned_bytes=plan.memory.total,
        peak_bytes=peak,
    )


def matmul_flops_per_second(device: torch.device, precision: str) -> float:
    """What this device reaches in the product of two large matrices."""
    size = _MATMUL_SIZE[device.type]
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[precision]
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    seconds = []
    for _ in range(_MATMUL_ROUNDS):
        begun = time.perf_counter()
        torch.mm(matrix, matrix)
        _wait_for(device)
        seconds.append(time.perf_counter() - begun)
    return 2 * size**3 / median(seconds[1:])


class _Phases:
    """Adds up the time between the beats of every step."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._device = device
        self._steps = 0
        self._phase, self._since = "", 0.0

    def begin(self) -> None:
        self._steps += 1
        self._phase = ""

    def beat(self, phase: str) -> None:
        _wait_for(self._device)  # what was started before belongs to the phase before
        now = time.perf_counter()
        if self._phase:
            spent = self.seconds.setdefault(self._phase, [])
            spent += [0.0] * (self._steps - len(spent))
            spent[-1] += now - self._since
        self._phase, self._since = phase, now

    def end(self) -> None:
        self.beat("")


def _random_batch(config: RunConfig) -> MicroBatch:
    generator = torch.Generator().manual_seed(config.seed)
    shape = (config.train.batch_sequences, config.data.sequence_length + 1)
    tokens = torch.randint(config.model.vocab_size, shape, generator=generator)
    return MicroBatch(tokens[:, :-1], tokens[:, 1:])


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.operators += 1
        return func(*args, **(kwargs or {}))


def _operators(work: Callable[[], object]) -> int:
    """How many operators reach the device, all in this thread: only there they are counted."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.autograd.set_multithreading_enabled(False), _Counting() as counting:
            work()
    finally:
        torch.set_num_threads(threads)
    return counting.operators


def _start_of_peak(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    forget_peak()
    return resident_bytes()


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_bytes()


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
