"""What all passes of one call share: its tensors as kernels want them, its tables, and its constants."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from models.kvm.kernels import tuning
from models.kvm.kernels.jit.keys import norm_slots_kernel, prepare_keys_kernel
from models.kvm.kernels.launch import current_target, launch
from models.kvm.kernels.tables import Tables, tables_of
from models.kvm.kernels.tuning import SMALLEST_DOT, Kernel, Shape, Target, Tile
from models.kvm.layout import KVMSettings, Plan

SlotTensors = tuple[Tensor, Tensor, Tensor]  # S_K, S_V [rows, m, D] and the magnitudes [rows, m]


@dataclass(frozen=True)
class Operands:
    """Contiguous tensors of one call.

    A row is a head of a batch entry: B * H of them. A query row is a head of its queries; those of one row
    follow each other, `group` of them.
    """

    q: Tensor  # [B, T, group * H, D]
    k: Tensor  # [B, t, H, D], the tokens before the call that it was handed included
    v: Tensor  # [B, t, H, D]
    gate: Tensor | None  # [B, t, H]
    norm_weight: Tensor  # [D] float32
    norm_bias: Tensor
    state_temperature: Tensor  # [H] float32
    window_temperature: Tensor
    tempered: bool  # False: both are ones
    settings: KVMSettings
    plan: Plan
    target: Target
    shape: Shape

    @cached_property
    def tables(self) -> Tables:
        """Made when they are asked for: a token that folds nothing needs none."""
        return tables_of(self.plan, self.tokens - self.queries, self.q.device)

    @property
    def queries(self) -> int:
        return self.q.shape[1]

    @property
    def tokens(self) -> int:
        return self.k.shape[1]

    @property
    def heads(self) -> int:
        return self.k.shape[2]

    @property
    def group(self) -> int:
        return self.q.shape[2] // self.heads

    @property
    def width(self) -> int:
        return self.q.shape[3]

    @property
    def rows(self) -> int:
        return self.q.shape[0] * self.heads

    @property
    def query_rows(self) -> int:
        return self.rows * self.group

    @property
    def folds(self) -> int:
        """Folds of the call, at least the one that an empty table holds room for."""
        return len(self.tables.folds)

    @property
    def scale(self) -> float:
        return self.width**-0.5

    def tile(self, kernel: Kernel) -> Tile:
        return tuning.choose(kernel, self.target, self.shape)

    def tiles(self, count: int, block: int) -> int:
        return -(-count // block)

    @property
    def gate_or_any(self) -> Tensor:
        """Kernels want a pointer, also where they never read it."""
        return self.v if self.gate is None else self.gate

    @property
    def widths(self) -> dict[str, int]:
        return {"D": self.width, "BLOCK_D": self.shape.block_d}

    @property
    def precision(self) -> str:
        return tuning.read_precision(self.target, self.shape)

    @property
    def folding(self) -> dict[str, Any]:
        """Constants of the kernels that bring tokens to their slots."""
        switches = self.settings
        return {
            "C": switches.chunk,
            "GATE": self.gate is not None,
            "SWITCHES": int(switches.gate_appends) + 2 * int(switches.gate_first_state),
            **self.widths,
        }

    @property
    def padded_chunk(self) -> int:
        """BLOCK_C of kernels that hold something of every token of a chunk."""
        return max(SMALLEST_DOT, 1 << (self.settings.chunk - 1).bit_length())

    @property
    def following(self) -> dict[str, Any]:
        """Constants of the kernels that follow sorted tokens to their slots, fold after fold."""
        return {"STEPS": self.settings.chunk.bit_length(), **self.folding}

    def prepare_keys(self, folds: range, row0: int, rows: int) -> Tensor:
        """[rows, folds, C, D] kbar of the tokens of some folds, zeros where a fold is short."""
        chunk, tile = self.settings.chunk, self.tile("prepare_keys")
        kbar = self.q.new_empty(rows, len(folds), chunk, self.width, dtype=torch.float32)
        launch(
            prepare_keys_kernel,
            (len(folds) * self.tiles(chunk, tile.block_m), rows),
            (
                self.k, kbar, self.norm_weight, self.norm_bias, self.tables.folds,
                folds.start, len(folds), row0, self.heads, self.tokens,
            ),
            tile,
            self.target,
            C=chunk,
            ROTARY=self.settings.rotary_dims,
            BLOCK=tile.block_m,
            **self.widths,
        )  # fmt: skip
        return kbar

    def norm_slots(self, sums: Tensor, slots: int) -> Tensor:
        """N_s(S_K) of the first `slots` of [rows, S, D]; the others are not written."""
        normed, tile = torch.empty_like(sums), self.tile("fold")
        launch(
            norm_slots_kernel,
            (self.tiles(slots, tile.block_m), self.rows),
            (sums, normed, self.norm_weight, self.norm_bias, slots, sums.shape[1]),
            tile,
            self.target,
            BLOCK=tile.block_m,
            **self.widths,
        )
        return normed


def operands(
    q: Tensor,
    keys: tuple[Tensor | None, Tensor],
    values: tuple[Tensor | None, Tensor],
    gate: tuple[Tensor | None, Tensor | None],
    norm: tuple[Tensor, Tensor],
    temperatures: tuple[Tensor | None, Tensor | None],
    settings: KVMSettings,
    plan: Plan,
) -> Operands:
    """Pairs are what the call was handed from before its tokens, and its tokens."""
    target = current_target(q.device)
    if target.backend == "interpreter" and q.dtype == torch.bfloat16:
        raise ValueError("Triton's interpreter multiplies bfloat16 wrongly; want float32 or float16 in it")
    joined_gate = None if gate[1] is None else _joined(gate[0], gate[1])
    given = [one is not None for one in temperatures]
    ones = norm[0].new_ones(keys[1].shape[2]) if any(given) else norm[0]  # a pointer that is never read
    return Operands(
        q.contiguous(),
        _joined(*keys),
        _joined(*values),
        joined_gate,
        norm[0].contiguous(),
        norm[1].contiguous(),
        ones if temperatures[0] is None else temperatures[0].contiguous(),
        ones if temperatures[1] is None else temperatures[1].contiguous(),
        any(given),
        settings,
        plan,
        target,
        Shape(q.shape[3], q.element_size()),
    )


def _joined(before: Tensor | None, local: Tensor) -> Tensor:
    """One tensor: a copy only where a call goes on after earlier tokens."""
    if before is None or before.shape[1] == 0:
        return local.contiguous()
    return torch.cat([before.to(local.dtype), local], dim=1)


def grown(boundary: Tensor, slots: int) -> Tensor:
    """A copy of [rows, m, ...] with room for `slots` slots, zero where they are not opened yet."""
    buffer = boundary.new_zeros(boundary.shape[0], slots, *boundary.shape[2:])
    buffer[:, : boundary.shape[1]] = boundary
    return buffer


@dataclass(frozen=True)
class Cut:
    """How a pass over states is cut so that what lies in memory at once stays bounded."""

    rows: int  # of one group
    most_slots: int  # slots of all snapshots of a segment

    @classmethod
    def fit(cls, call: Operands, bytes_per_slot: int, kept_per_slot: int, limit: int) -> "Cut":
        """`bytes_per_slot` of a snapshot; `kept_per_slot` of the state kept at the start of each segment."""
        count = len(call.tables.snapshot_slots)
        widest = max(*call.tables.snapshot_slots, call.settings.chunk)
        shortest = max(1, round((count * kept_per_slot / bytes_per_slot) ** 0.5))
        kept = -(-count // shortest) * widest * kept_per_slot
        rows = min(max(limit // (shortest * widest * bytes_per_slot + kept), 1), call.rows)
        return cls(rows, max((limit - rows * kept) // (rows * bytes_per_slot), shortest * widest))

    def groups(self, call: Operands) -> list[tuple[int, int]]:
        """(first row, rows)."""
        return [(row, min(self.rows, call.rows - row)) for row in range(0, call.rows, self.rows)]
