"""Which tokens are read, and when they are folded into the state: pure integer functions of the position.

Letters: C tokens of a chunk, n chunks of the window, L = n*C. Positions count from the sequence's start.
"""

from dataclasses import dataclass
from functools import lru_cache

from models.budget import FixedBudget, SaturatingBudget, SlotBudget


@dataclass(frozen=True)
class KVMSettings:
    """Everything about the operator that is not a tensor (arXiv 2605.09877, section 3)."""

    budget: SlotBudget
    chunk: int = 256
    window_chunks: int = 2
    sinks: int = 1
    rotary_dims: int = 0
    max_slots: int | None = None
    gate_appends: bool = False
    gate_first_state: bool = False
    value_radius: bool = True

    def __post_init__(self) -> None:
        for name in ("chunk", "window_chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: want at least 1")
        if not 0 <= self.sinks < self.chunk:
            raise ValueError(
                f"sinks={self.sinks}: want 0 <= sinks < chunk={self.chunk}, or the first state has no "
                "slot to merge into; lower sinks or raise chunk"
            )
        if self.rotary_dims < 0:
            raise ValueError(f"rotary_dims={self.rotary_dims}: want at least 0")
        self._refuse_idle_slots()

    def _refuse_idle_slots(self) -> None:
        """The first state has a slot for each of its C tokens, so a smaller bound would never act."""
        bounds = {"max_slots": self.max_slots}
        if isinstance(self.budget, FixedBudget):
            bounds["budget.slots"] = self.budget.slots
        if isinstance(self.budget, SaturatingBudget):
            bounds["budget.limit"] = max(self.budget.limit, self.budget.minimum)
        for name, bound in bounds.items():
            if bound is not None and bound < self.chunk:
                raise ValueError(
                    f"{name}={bound}: the first state already holds chunk={self.chunk} slots, so it would "
                    f"never act; want {name} >= {self.chunk} or a smaller chunk"
                )

    @property
    def window(self) -> int:
        """L, the tokens of the window, the current chunk included."""
        return self.chunk * self.window_chunks

    @property
    def halo(self) -> int:
        """Tokens before a chunk that its first token still reads from the window."""
        return self.window - self.chunk


@dataclass(frozen=True)
class Fold:
    """Tokens [start, stop) entering the state, which grows from `slots_before` to `slots_after`."""

    start: int
    stop: int
    slots_before: int
    slots_after: int
    is_first_state: bool  # every token opens a slot; otherwise one whole chunk that overflowed the window

    @property
    def appended(self) -> int:
        return self.slots_after - self.slots_before


@dataclass(frozen=True)
class Block:
    """Query tokens [start, stop) of one chunk, and what they read after `folds` have entered the state."""

    start: int
    stop: int
    window_start: int  # window keys [window_start, stop), causal
    slots: int  # 0: the state is not read
    folds: tuple[Fold, ...]


@dataclass(frozen=True)
class Plan:
    """One call: its blocks in order, and the folds after the last block."""

    start: int
    stop: int
    covered_start: int  # tokens in the state the call starts from
    covered_stop: int  # tokens in the state it leaves
    slots_start: int
    blocks: tuple[Block, ...]
    closing: tuple[Fold, ...]

    @property
    def folds(self) -> tuple[Fold, ...]:
        return tuple(fold for block in self.blocks for fold in block.folds) + self.closing

    @property
    def slots_stop(self) -> int:
        return self.folds[-1].slots_after if self.folds else self.slots_start


def tokens_covered(settings: KVMSettings, position: int) -> int:
    """Tokens in the state after `position` tokens: a chunk is folded in only when a block needs it."""
    chunk_stop = -(-position // settings.chunk) * settings.chunk
    return max(min(position, settings.chunk), chunk_stop - settings.window)


def tokens_covered_ahead(settings: KVMSettings, position: int) -> int:
    """Tokens in the state that a block starting at `position`, a chunk edge, reads."""
    return max(min(position, settings.chunk), position - settings.halo)


def window_start(settings: KVMSettings, position: int) -> int:
    """The earliest token that is kept beside the state once `position` tokens were seen."""
    return max(0, -(-position // settings.chunk) * settings.chunk - settings.window)


@lru_cache(maxsize=1024)
def slots_covering(settings: KVMSettings, tokens: int) -> int:
    """Slots of a state that covers [0, tokens)."""
    folds = folds_between(settings, 0, tokens, 0)
    return folds[-1].slots_after if folds else 0


def folds_between(settings: KVMSettings, covered: int, wanted: int, slots: int) -> tuple[Fold, ...]:
    """The folds that take a state of `slots` slots from covering [0, covered) to covering [0, wanted)."""
    folds = []
    if covered < min(wanted, settings.chunk):
        stop = min(wanted, settings.chunk)
        folds.append(Fold(covered, stop, slots, slots + stop - covered, is_first_state=True))
        covered, slots = stop, folds[-1].slots_after
    while covered < wanted:
        stop = covered + settings.chunk
        grown = slots + _append_count(settings, stop, slots)
        folds.append(Fold(covered, stop, slots, grown, is_first_state=False))
        covered, slots = stop, grown
    return tuple(folds)


def _append_count(settings: KVMSettings, covered: int, slots: int) -> int:
    """New slots when the state comes to cover [0, covered); the tokens read by then end n-1 chunks later."""
    target = min(settings.budget.slots_at(covered + settings.halo), covered)
    if settings.max_slots is not None:
        target = min(target, settings.max_slots)
    return min(max(target - slots, 0), settings.chunk)


def plan_call(
    settings: KVMSettings, start: int, stop: int, *, ahead_at_start: bool = False, ahead_at_stop: bool = False
) -> Plan:
    """The blocks and folds of tokens [start, stop).

    `ahead_at_start`: the state at hand already covers what the first block reads (the rank before sent it).
    `ahead_at_stop`: leave the state so for the rank after.
    """
    covered_start = (tokens_covered_ahead if ahead_at_start else tokens_covered)(settings, start)
    covered_stop = (tokens_covered_ahead if ahead_at_stop else tokens_covered)(settings, stop)
    slots_start = slots_covering(settings, covered_start)
    covered, slots, blocks, at = covered_start, slots_start, [], start
    while at < stop:
        chunk_start = at // settings.chunk * settings.chunk
        block_stop = min(stop, chunk_start + settings.chunk)
        reach = chunk_start - settings.halo  # from here on the window is read, before it the state
        folds = folds_between(settings, covered, reach, slots) if reach > 0 else ()
        if folds:
            covered, slots = folds[-1].stop, folds[-1].slots_after
        blocks.append(Block(at, block_stop, max(reach, 0), slots if reach > 0 else 0, folds))
        at = block_stop
    closing = folds_between(settings, covered, covered_stop, slots)
    return Plan(start, stop, covered_start, covered_stop, slots_start, tuple(blocks), closing)
