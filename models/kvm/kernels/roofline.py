"""The least time of every kernel: its arithmetic at the peak rate, or its fewest bytes at full bandwidth.

Bytes are compulsory ones: what a kernel is handed is read once and what it hands on is written once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from models.budget import SlotBudget
from models.kvm.layout import KVMSettings, Plan, plan_call

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Device:
    """Peak dense rates by the vendor's data sheet, operations and bytes a second."""

    name: str
    half_flops: float  # bfloat16 and float16 products, float32 sums
    float32_flops: float  # float32 products as the kernels form them (three tf32 passes; float32 MFMA)
    bandwidth: float


DEVICES = {
    "H200": Device("H200", 989e12, 495e12 / 3, 4.8e12),
    "MI325X": Device("MI325X", 1307e12, 163e12, 6.0e12),
}


@dataclass(frozen=True)
class RooflineRow:
    kernel: str
    device: str
    flops: float
    bytes: float
    floor_seconds: float

    @property
    def bound(self) -> str:
        return "memory" if self.bytes / DEVICES[self.device].bandwidth >= self.floor_seconds else "arithmetic"


@dataclass(frozen=True)
class _Work:
    """Of one row (a head of a batch entry), per kernel: (operations of inputs' dtype, of float32, bytes)."""

    plan: Plan
    settings: KVMSettings
    width: int
    element: int

    def __iter__(self) -> Iterator[tuple[str, tuple[float, float, float]]]:
        passes: dict[str, Callable[[], tuple[float, float, float]]] = {
            "prepare_keys": self._prepare_keys,
            "route": self._route,
            "fold": self._fold,
            "walk": self._walk,
            "read": self._read,
            "read_backward_queries": self._queries,
            "read_backward_slots": self._slots,
            "read_backward_window": self._window,
            "share_out": self._share_out,
            "prepare_keys_backward": self._prepare_keys_backward,
        }
        return ((name, work()) for name, work in passes.items())

    @property
    def _tokens(self) -> int:
        return self.plan.stop - self.plan.start

    @property
    def _folded(self) -> int:
        return sum(fold.stop - fold.start for fold in self.plan.folds)

    @property
    def _slot_reads(self) -> int:
        """Slots of all states that are read."""
        return sum(block.slots for block in self.plan.blocks)

    @property
    def _state_pairs(self) -> int:
        return sum((block.stop - block.start) * block.slots for block in self.plan.blocks)

    @property
    def _window_pairs(self) -> int:
        pairs = 0
        for block in self.plan.blocks:
            first, last = block.start + 1 - block.window_start, block.stop - block.window_start
            pairs += (first + last) * (block.stop - block.start) // 2
        return pairs

    def _prepare_keys(self) -> tuple[float, float, float]:
        elements = self._folded * self.width
        return 0, 8 * elements, elements * (self.element + FLOAT32_BYTES)

    def _prepare_keys_backward(self) -> tuple[float, float, float]:
        elements = self._folded * self.width
        return 0, 16 * elements, elements * (self.element + 3 * FLOAT32_BYTES)

    def _route(self) -> tuple[float, float, float]:
        routed = [fold for fold in self.plan.folds if not fold.is_first_state]
        pairs = sum((fold.stop - fold.start) * fold.slots_after for fold in routed)
        slots = sum(fold.slots_after for fold in routed)
        return 0, 2 * pairs * self.width, (slots + self._folded) * self.width * FLOAT32_BYTES

    def _fold(self) -> tuple[float, float, float]:
        """At most one slot per token is touched: its sum is read and written, its normed key written."""
        elements = self._folded * self.width
        return 0, 10 * elements, 4 * elements * FLOAT32_BYTES

    def _walk(self) -> tuple[float, float, float]:
        written = self._slot_reads * self.width
        folded = self._folded * self.width
        return (
            0,
            4 * folded + 12 * written,
            written * 2 * self.element + folded * (self.element + FLOAT32_BYTES),
        )

    def _call_bytes(self, tensors: int) -> float:
        return tensors * self._tokens * self.width * self.element

    def _state_bytes(self) -> float:
        return self._slot_reads * self.width * 2 * self.element

    def _read(self) -> tuple[float, float, float]:
        pairs = self._state_pairs + self._window_pairs
        return 4 * pairs * self.width, 0, self._call_bytes(4) + self._state_bytes()

    def _queries(self) -> tuple[float, float, float]:
        pairs = self._state_pairs + self._window_pairs
        return 6 * pairs * self.width, 0, self._call_bytes(5) + self._state_bytes()

    def _slots(self) -> tuple[float, float, float]:
        sums = self._slot_reads * self.width * 4 * FLOAT32_BYTES  # read S_K and S_V, write their gradients
        return 8 * self._state_pairs * self.width, 0, self._call_bytes(2) + self._state_bytes() + sums

    def _window(self) -> tuple[float, float, float]:
        gradients = 2 * self._tokens * self.width * FLOAT32_BYTES
        return 8 * self._window_pairs * self.width, 0, self._call_bytes(4) + gradients

    def _share_out(self) -> tuple[float, float, float]:
        folded = self._folded * self.width
        sent = self._slot_reads * self.width * 2 * FLOAT32_BYTES
        return (
            0,
            8 * folded + 2 * self._slot_reads * self.width,
            sent + folded * (self.element + 4 * FLOAT32_BYTES),
        )


def kernel_work(
    plan: Plan, settings: KVMSettings, width: int, element_bytes: int
) -> dict[str, tuple[float, float, float]]:
    """Of one row (a head of a batch entry), per kernel: (operations of inputs' dtype, of float32, bytes)."""
    return dict(_Work(plan, settings, width, element_bytes))


def roofline(
    budget: SlotBudget,
    tokens: int,
    *,
    batch: int = 8,
    heads: int = 32,
    width: int = 128,
    element_bytes: int = 2,
    chunk: int = 256,
    window_chunks: int = 2,
) -> list[RooflineRow]:
    """Every kernel of one forward and backward, and of one token decoded after it, on every device."""
    settings = KVMSettings(budget, chunk, window_chunks)
    rows = batch * heads
    work = kernel_work(plan_call(settings, 0, tokens), settings, width, element_bytes)
    work["decode"] = _decode(plan_call(settings, 0, tokens + 1), width, element_bytes)
    found = []
    for device in DEVICES.values():
        for kernel, (half, float32, size) in work.items():
            if element_bytes == FLOAT32_BYTES:
                half, float32 = 0, half + float32
            arithmetic = half / device.half_flops + float32 / device.float32_flops
            floor = rows * max(arithmetic, size / device.bandwidth)
            found.append(RooflineRow(kernel, device.name, rows * (half + float32), rows * size, floor))
    return found


def _decode(plan: Plan, width: int, element: int) -> tuple[float, float, float]:
    block = plan.blocks[-1]
    window = plan.stop - block.window_start
    size = block.slots * (2 * width + 1) * FLOAT32_BYTES + window * 2 * width * element
    return 0, 4 * (block.slots + window) * width, size
