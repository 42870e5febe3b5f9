"""The launches of calls that never run: what is compiled ahead of time, and reported."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.budget import FixedBudget, PowerLawBudget, SlotBudget
from models.kvm.kernels.compile import Memory
from models.kvm.kernels.launch import Launch, recorded_launches
from models.kvm.kernels.tuning import Target
from models.kvm.ops import kvm_attention
from models.kvm.state import KVMState

HEADS, WINDOW_CHUNKS = 16, 2


@dataclass(frozen=True)
class ShapeClass:
    """Calls that launch the same kernels with the same rows on one target."""

    target: str
    dtype: torch.dtype
    width: int
    chunk: int = 256
    memory: Memory = "buffers"
    switched: bool = False  # calls with all switches on, and with all parts left out that may be

    def __str__(self) -> str:
        name = f"{self.target} {str(self.dtype).removeprefix('torch.')} D={self.width} C={self.chunk}"
        name += ", switches" if self.switched else ""
        return name if self.memory == "buffers" else f"{name}, {self.memory}"


def sample_launches(
    target: Target, dtype: torch.dtype, width: int, chunk: int = 256, switched: bool = False
) -> list[Launch]:
    """Forward, backward and decoding with n=2: every kernel of one shape class.

    Each kernel comes once per set of constants; a growing and a fixed budget route differently. switched: see
    `ShapeClass`; forward and backward alone.
    """
    calls = _Calls(dtype, width, chunk)
    with recorded_launches(target) as recorded:
        if switched:
            calls.train_switched()
        else:
            for budget in (PowerLawBudget(), FixedBudget(slots=chunk)):
                calls.train(budget)
            for tokens in (1, chunk):
                calls.go_on(tokens)
    launches: dict[tuple[object, ...], Launch] = {}
    for launch in recorded:
        launches.setdefault((launch.kernel.__name__, *sorted(launch.constants.items())), launch)
    return list(launches.values())


@dataclass(frozen=True)
class _Calls:
    dtype: torch.dtype
    width: int
    chunk: int

    @property
    def _position(self) -> int:
        return 4 * self.chunk + 100

    def _tokens(self, count: int, group: int = 1) -> dict[str, Tensor]:
        """And what else belongs to a head of keys, each read by `group` heads of queries."""
        shapes = dict.fromkeys(("k", "v"), (1, count, HEADS // group, self.width))
        tokens = {name: torch.empty(shape, dtype=self.dtype) for name, shape in shapes.items()}
        return {
            "q": torch.empty(1, count, HEADS, self.width, dtype=self.dtype),
            **tokens,
            "merge_gate": torch.empty(1, count, HEADS // group, dtype=self.dtype),
            "state_temperature": torch.empty(HEADS // group),
            "window_temperature": torch.empty(HEADS // group),
        }

    def _call(self, budget: SlotBudget, tokens: dict[str, Tensor], **more: Any) -> Tensor:
        """With gradients, where those are on."""
        norm = {name: torch.empty(self.width) for name in ("key_norm_weight", "key_norm_bias")}
        arguments: dict[str, Any] = {"merge_gate": None}
        arguments |= {name: tensor.requires_grad_() for name, tensor in (tokens | norm).items()}
        output, _ = kvm_attention(
            **arguments,
            budget=budget,
            chunk=self.chunk,
            window_chunks=WINDOW_CHUNKS,
            rotary_dims=self.width // 2,
            backend="triton",
            **more,
        )
        return output

    def train(self, budget: SlotBudget) -> None:
        output = self._call(budget, self._tokens(self._position))
        output.backward(torch.empty_like(output))

    def train_switched(self) -> None:
        grouped, bare = self._tokens(self._position, group=4), self._tokens(self._position)
        for name in ("merge_gate", "state_temperature", "window_temperature"):
            del bare[name]
        for output in (
            self._call(PowerLawBudget(), grouped, gate_appends=True, gate_first_state=True),
            self._call(PowerLawBudget(), bare, value_radius=False),
        ):
            output.backward(torch.empty_like(output))

    def go_on(self, tokens: int) -> None:
        """Without gradients, after a state."""
        slots = torch.empty(1, HEADS, self.chunk, self.width)
        window = self._tokens(self._position - 3 * self.chunk)
        state = KVMState(
            slots,
            slots,
            slots[..., 0].contiguous(),
            None,
            window["k"],
            window["v"],
            window["merge_gate"],
            self._position,
        )
        with torch.no_grad():
            self._call(FixedBudget(slots=self.chunk), self._tokens(tokens), state=state, return_state=True)
