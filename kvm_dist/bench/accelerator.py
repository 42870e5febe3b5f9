"""KVM against full attention on an accelerator: decode, prefill and backward over lengths.

One layer's sequence mixing, routing and state update included, as measured in arXiv 2605.09877, Section 5.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from kvm_dist.bench.floors import Peak, full_floor, kvm_floor, peak_of
from kvm_dist.bench.one_layer import Shape, call_kvm, make_inputs
from kvm_dist.bench.pace import Pace
from kvm_dist.bench.results import Goal
from kvm_dist.bench.setting import BUDGETS, FULL_ATTENTION
from models.budget import SlotBudget
from models.kvm import KVMState

LENGTHS = tuple(1024 * 2**power for power in range(8))  # 1K to 128K
GOAL_TOKENS = 32_768
GOALS = {"prefill": (9.0, 2.2), "backward": (12.0, 3.6), "decode": (30.0, 8.0)}  # on an H200, of BUDGETS
REPLAYED = "decode, replayed"  # as one CUDA graph: without what Python costs


@dataclass(frozen=True)
class Measured:
    """seconds: median of one call; ratio: full attention's seconds over these, None where it was left out."""

    phase: str  # prefill, backward, decode or REPLAYED
    method: str
    tokens: int
    seconds: float
    floor_seconds: float | None  # by the device's peak FLOPs and bandwidth
    ratio: float | None = None

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class _Call:
    """What is timed as one: `tokens` decoded one after another, or a whole sequence."""

    run: Callable[[], object]
    tokens: int = 1


_Calls = dict[str, Callable[[], _Call]]  # of each phase, with what has to be done before it is timed


def measure(
    device: torch.device,
    shape: Shape,
    lengths: tuple[int, ...],
    pace: Pace,
    clock: "Clock | None" = None,
    left_out: Callable[[str], None] = lambda _: None,
) -> Iterator[Measured]:
    """Every phase and method at growing lengths, full attention first, as long as `pace` has time for them.

    left_out: is told what is not measured, and why.
    """
    clock = clock or Clock(device)
    for tokens in lengths:
        found, late = 0, list[str]()
        try:
            for row in _at_length(device, shape, tokens, clock, pace, late):
                found += 1
                yield row
        except torch.OutOfMemoryError:
            left_out(f"{tokens:,} tokens do not fit into memory after {found} measurements")
            return
        for what in late if found else [f"{tokens:,} tokens and more"]:
            left_out(f"{what}: the time is over")
        if not found:
            return


def goals(rows: list[Measured], device_name: str) -> Iterator[Goal]:
    """What an H200 is held to at 32K; of the two ways to decode the faster counts."""
    if "H200" not in device_name:
        return
    for phase, wanted in GOALS.items():
        for method, least in zip(BUDGETS, wanted, strict=True):
            got = [
                row.ratio
                for row in rows
                if row.ratio is not None
                and (row.tokens, row.method) == (GOAL_TOKENS, method)
                and row.phase.startswith(phase)
            ]
            if got:
                yield Goal(f"{method}: {phase}, times faster at 32K", least, max(got), at_least=True)


def _at_length(
    device: torch.device, shape: Shape, tokens: int, clock: "Clock", pace: Pace, late: list[str]
) -> Iterator[Measured]:
    """Rows as they are measured; `late` is given the names of those that would end too late."""
    peak = peak_of(device)
    inputs = make_inputs(shape, tokens, device, requires_grad=True)
    full: dict[str, float] = {}
    for method, calls in _methods(inputs, shape):
        for phase, prepared in calls.items():
            if pace.late((method, phase), tokens):
                late.append(f"{tokens:,} {phase} {method}")
                continue
            begun = pace.now()
            call = prepared()
            seconds = clock.median(call.run) / call.tokens
            del call  # and what it holds, before the next is made
            pace.took((method, phase), tokens, pace.now() - begun)
            if method == FULL_ATTENTION:
                full[phase] = seconds
            floor = _floor(phase, method, tokens, shape, peak) if peak else None
            ratio = full[phase] / seconds if phase in full else None
            yield Measured(phase, method, tokens, seconds, floor, ratio)


def _methods(inputs: list[Tensor], shape: Shape) -> Iterator[tuple[str, _Calls]]:
    """Full attention first: what the others are compared with. Its tensors are freed before they begin."""
    yield FULL_ATTENTION, _full_calls(inputs, _decoded(inputs[0].shape[1], shape))
    for name, budget in BUDGETS.items():
        yield name, _kvm_calls(inputs, budget, shape)


def _floor(phase: str, method: str, tokens: int, shape: Shape, peak: Peak) -> float:
    if method == FULL_ATTENTION:
        return full_floor(phase, tokens, shape, peak)
    return kvm_floor(phase, tokens, BUDGETS[method], shape, peak)


def _decoded(tokens: int, shape: Shape) -> int:
    """How many of the last tokens are decoded: a chunk of them folds one chunk into the state."""
    return min(shape.chunk, tokens - 1)


def _kvm_calls(inputs: list[Tensor], budget: SlotBudget, shape: Shape) -> _Calls:
    detached = [z.detach() for z in inputs]
    tokens = inputs[0].shape[1]
    count = _decoded(tokens, shape)

    def decoded() -> _Call:
        _, before = call_kvm([z[:, : tokens - count] for z in detached], budget, shape, return_state=True)
        rest = [[z[:, i : i + 1] for z in detached] for i in range(tokens - count, tokens)]

        @torch.no_grad()
        def decode() -> None:
            state = before
            for token in rest:
                _, state = call_kvm(token, budget, shape, state=state, return_state=True)

        return _Call(decode, count)

    def replayed() -> _Call:
        last, before = ([z[:, i : i + 1] for z in detached] for i in (tokens - 1, tokens - 2))
        states = iter(_growing(detached, before, budget, shape))
        return _replayed(lambda: call_kvm(last, budget, shape, state=next(states), return_state=True), count)

    calls: _Calls = {
        "prefill": lambda: _Call(lambda: call_kvm(detached, budget, shape)),
        "backward": lambda: _backward(call_kvm(inputs, budget, shape)[0], inputs),
        "decode": decoded,
    }
    return calls | ({REPLAYED: replayed} if can_replay(inputs[0]) and tokens > 2 else {})


def _growing(
    inputs: list[Tensor], token: list[Tensor], budget: SlotBudget, shape: Shape
) -> list[KVMState | None]:
    """Two states before the last token, whose windows have room for it: to warm up, and to record."""
    with torch.no_grad():
        _, before = call_kvm([z[:, :-2] for z in inputs], budget, shape, return_state=True)
        return [call_kvm(token, budget, shape, state=before, return_state=True)[1] for _ in range(2)]


def _full_calls(inputs: list[Tensor], decoded: int) -> _Calls:
    q, k, v = (z.detach().transpose(1, 2).contiguous().requires_grad_() for z in inputs[:3])
    a, b, c = q.detach(), k.detach(), v.detach()
    last = a[:, :, -1:].contiguous()

    def decode() -> None:
        for _ in range(decoded):
            F.scaled_dot_product_attention(last, b, c)

    calls: _Calls = {
        "prefill": lambda: _Call(lambda: F.scaled_dot_product_attention(a, b, c, is_causal=True)),
        "backward": lambda: _backward(F.scaled_dot_product_attention(q, k, v, is_causal=True), [q, k, v]),
        "decode": lambda: _Call(decode, decoded),
    }
    replayed = {REPLAYED: lambda: _replayed(lambda: F.scaled_dot_product_attention(last, b, c), decoded)}
    return calls | (replayed if can_replay(inputs[0]) else {})


def _backward(out: Tensor, inputs: list[Tensor]) -> _Call:
    gradient = torch.ones_like(out)
    return _Call(lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True))


def can_replay(tensor: Tensor) -> bool:
    """Whether launches on its device can be recorded as a graph."""
    return tensor.is_cuda


def _replayed(call: Callable[[], object], count: int) -> _Call:
    """One token that folds nothing, recorded once and replayed `count` times."""
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        call()  # what is made at a first call cannot be recorded
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            call()

    def replay() -> None:
        for _ in range(count):
            graph.replay()

    return _Call(replay, count)


class Clock:
    """Medians of synchronised calls; CUDA events where there is a GPU."""

    def __init__(
        self,
        device: torch.device,
        repeats: int = 5,
        most_repeats: int = 20,
        enough_seconds: float = 0.2,
        most_seconds: float = 4.0,
    ) -> None:
        self.device, self.repeats, self.most_repeats = device, repeats, most_repeats
        self.enough_seconds, self.most_seconds = enough_seconds, most_seconds

    def median(self, call: Callable[[], object]) -> float:
        """Seconds of one call, after one to warm up: more repeats of short calls, fewer of long ones."""
        call()
        self._synchronise()
        taken = [self._once(call)]
        while self._wants_more(taken):
            taken.append(self._once(call))
        return median(taken)

    def _wants_more(self, taken: list[float]) -> bool:
        if sum(taken) + taken[-1] > self.most_seconds:
            return False
        return len(taken) < self.repeats or (
            len(taken) < self.most_repeats and sum(taken) < self.enough_seconds
        )

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _once(self, call: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            begun = time.perf_counter()
            call()
            return time.perf_counter() - begun
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
