"""Settings and cost of RWKV-7. Imports no torch."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from models.kinds.recurrence import CHUNK
from models.layer_config import Elements, LayerConfig, MixerCost, low_rank

if TYPE_CHECKING:
    from models.config import ModelConfig


class RWKV7Config(LayerConfig):
    """RWKV-7: a linear recurrence with a generalised delta rule."""

    implementation: ClassVar[str] = "models.layers.rwkv7:RWKV7"

    head_dim: int = Field(64, ge=1)
    decay_rank: int | None = Field(None, ge=1, description="null: 1.8*sqrt(d) rounded to 32")
    rate_rank: int | None = Field(None, ge=1, description="null: 1.8*sqrt(d) rounded to 32")
    value_rank: int | None = Field(None, ge=1, description="null: 1.3*sqrt(d) rounded to 32")
    gate_rank: int | None = Field(None, ge=1, description="null: 0.6*d^0.8 rounded to 32")

    @property
    def position_multiple(self) -> int:
        return CHUNK

    def ranks(self, width: int) -> dict[str, int]:
        """Ranks of the low-rank maps decay, rate, value and gate at a hidden width."""
        return {
            "decay": self.decay_rank or low_rank(width, 1.8),
            "rate": self.rate_rank or low_rank(width, 1.8),
            "value": self.value_rank or low_rank(width, 1.3),
            "gate": self.gate_rank or low_rank(width, 0.6, 0.8),
        }

    def problems(self, model: "ModelConfig", kind: str) -> list[str]:
        if model.hidden_size % self.head_dim == 0:
            return []
        return [
            f"model.hidden_size={model.hidden_size} is not divisible by model.{kind}.head_dim="
            f"{self.head_dim}; change one of them"
        ]

    def cost(self, model: "ModelConfig", context_tokens: int) -> MixerCost:
        width = model.hidden_size
        ranks = self.ranks(width)
        if not model.value_residual:
            del ranks["value"]
        matrices = 4 * width**2 + 2 * width * sum(ranks.values())
        vectors = 6 + 2 + model.value_residual + 3 + 2  # shifts, biases, per-channel factors, norm
        state = width * self.head_dim
        return MixerCost(
            parameters=matrices + vectors * width,
            forward_flops=2 * matrices + 9 * state,  # decay 1, removal 2, two rank-1 updates 4, read 2
            boundary=Elements(width, state),
            decode_state=Elements(width, state),
            first_boundary=Elements(width * model.value_residual),
            saved=self._saved(model, sum(ranks.values())),
        )

    def _saved(self, model: "ModelConfig", ranks: int) -> Elements:
        """Of the recurrence in matmuls; kernels that compute it again in the backward keep less. Its maps and
        states are float32 and count one chunk's share: four of [K, V], five of scores of a chunk's tokens."""
        width, state = model.hidden_size, model.hidden_size * self.head_dim // CHUNK
        if model.activation_checkpointing:
            return Elements(0, 10 * width + 2 * state)
        scores = 5 * CHUNK * width // self.head_dim
        projections = (23 if model.value_residual else 21) * width + ranks
        return Elements(projections, 16 * width + 4 * state + scores)
