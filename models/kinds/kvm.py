"""Settings and cost of Key-Value Means. Imports no torch."""

from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from models.budget import Budget, FixedBudget, PowerLawBudget, SaturatingBudget
from models.kinds.attention import (
    AttentionConfig,
    projection_flops,
    projection_parameters,
    read_flops,
    saved_elements,
    shift_elements,
)
from models.layer_config import Elements, MixerCost

if TYPE_CHECKING:
    from models.config import ModelConfig


class KVMConfig(AttentionConfig):
    """Key-Value Means: softmax over a block window and a growing state of slots (arXiv 2605.09877)."""

    implementation: ClassVar[str] = "models.layers.kvm:KVM"
    must_leave_a_dim: ClassVar[bool] = True

    kv_heads: int | None = Field(
        None,
        ge=1,
        description="heads of keys, values and states, each read by as many query heads; null: num_heads",
    )
    chunk: int = Field(256, ge=1, description="tokens of a block")
    window_chunks: int = Field(2, ge=1, description="blocks of the window, the current one included")
    sinks: int = Field(1, ge=0, description="first slots that are read and never written")
    budget: Budget = PowerLawBudget()
    max_slots: int | None = Field(None, ge=1, description="hard cap on the slots; null: none")
    head_temperatures: bool = True
    merge_gate: bool = True
    gate_appends: bool = False
    gate_first_state: bool = False
    value_radius: bool = True
    backend: Literal["auto", "reference", "torch", "triton"] = "auto"

    @property
    def position_multiple(self) -> int:
        return self.chunk

    def key_value_heads(self, model: "ModelConfig") -> int:
        """Heads that have keys, values and a state of their own."""
        return self.kv_heads or model.num_heads

    def problems(self, model: "ModelConfig", kind: str) -> list[str]:
        problems = super().problems(model, kind)
        if model.num_heads % self.key_value_heads(model):
            problems.append(
                f"model.{kind}.kv_heads={self.kv_heads} does not divide model.num_heads={model.num_heads}; "
                "use a divisor of it, or null for as many"
            )
        if self.sinks >= self.chunk:
            problems.append(f"model.{kind}.sinks={self.sinks} must be below chunk={self.chunk}; lower it")
        bounds = {"max_slots": self.max_slots}
        if isinstance(self.budget, FixedBudget):
            bounds["budget.slots"] = self.budget.slots
        if isinstance(self.budget, SaturatingBudget):
            bounds["budget.limit"] = max(self.budget.limit, self.budget.minimum)
        problems += [
            f"model.{kind}.{name}={bound} would never act, the first state holds chunk={self.chunk} slots; "
            "raise it or lower the chunk"
            for name, bound in bounds.items()
            if bound is not None and bound < self.chunk
        ]
        return problems

    def slots_covering(self, tokens: int) -> int:
        """Slots of a state that covers the first `tokens` tokens, as its last block of them was folded in."""
        if tokens <= self.chunk:
            return max(tokens, 0)
        chunks = -(-tokens // self.chunk)
        return _slots_by_chunk(self, 1 << (chunks - 1).bit_length())[chunks - 1]

    def slots_after(self, tokens: int) -> int:
        """Slots once `tokens` tokens were read: those of the window are in no slot yet."""
        block_stop = -(-tokens // self.chunk) * self.chunk
        covered = block_stop - self.window_chunks * self.chunk
        return self.slots_covering(max(min(tokens, self.chunk), covered))

    def cost(self, model: "ModelConfig", context_tokens: int) -> MixerCost:
        heads, width = self.key_value_heads(model), model.head_width
        block_stop = -(-context_tokens // self.chunk) * self.chunk
        halo = (self.window_chunks - 1) * self.chunk
        read_slots = self.slots_covering(block_stop - halo - self.chunk)
        boundary_slots = self.slots_covering(max(min(context_tokens, self.chunk), block_stop - halo))
        kept_slots = self.slots_after(context_tokens)
        window = context_tokens - max(block_stop - halo - self.chunk, 0)
        slot_elements = heads * (2 * width + 1)
        window_token = heads * (2 * width + self.merge_gate)
        shift = shift_elements(model, heads)
        parameters = projection_parameters(model, kv_heads=heads) + 2 * width
        parameters += heads * (model.hidden_size * self.merge_gate + 2 * self.head_temperatures)
        routing = 2 * heads * width * read_slots + 4 * heads * width
        gate = 2 * model.hidden_size * heads * self.merge_gate
        reads = read_flops(model, read_slots + window)
        return MixerCost(
            parameters=parameters,
            forward_flops=projection_flops(model, heads) + gate + reads + routing,
            boundary=Elements(
                shift + window_token * min(halo, context_tokens), slot_elements * boundary_slots
            ),
            decode_state=Elements(shift + window_token * window, slot_elements * kept_slots),
            saved=saved_elements(model, heads) + Elements(4 * heads * self.merge_gate, heads),  # gate; routes
        )


@lru_cache(maxsize=64)
def _slots_by_chunk(config: KVMConfig, chunks: int) -> tuple[int, ...]:
    """Slots once 1, 2, ... whole chunks are in the state: each may add at most a chunk of them.

    Asked for powers of two of chunks, so that the costs of a long sequence count its slots once.
    """
    slots, found = config.chunk, [config.chunk]
    halo = (config.window_chunks - 1) * config.chunk
    for covered in range(2 * config.chunk, chunks * config.chunk + 1, config.chunk):
        target = min(config.budget.slots_at(covered + halo), covered, config.max_slots or covered)
        slots += min(max(target - slots, 0), config.chunk)
        found.append(slots)
    return tuple(found)
