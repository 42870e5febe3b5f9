"""What the settings and the costs of all attention kinds share. Imports no torch."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from models.layer_config import LayerConfig, low_rank

if TYPE_CHECKING:
    from models.config import ModelConfig

VALUE_RESIDUAL_FACTOR = 1.3  # rank of the value residual's gate over the square root of the width


class AttentionConfig(LayerConfig):
    """Settings of a kind with queries, keys and values of `num_heads` heads."""

    rotates_whole_head: ClassVar[bool] = False
    must_leave_a_dim: ClassVar[bool] = False

    rotary_dims: int | None = Field(
        None, ge=0, description="null: half of the head width, all of it for windows"
    )

    def rotary(self, head_width: int) -> int:
        """Dims of a head that are rotated."""
        if self.rotary_dims is not None:
            return self.rotary_dims
        return (head_width if self.rotates_whole_head else head_width // 2) // 2 * 2

    def problems(self, model: "ModelConfig", kind: str) -> list[str]:
        dims, width = self.rotary(model.head_width), model.head_width
        if dims % 2:
            return [
                f"model.{kind}.rotary_dims={dims} is odd; rotary turns pairs of dims, give an even number"
            ]
        if dims > width - self.must_leave_a_dim:
            bound = "below" if self.must_leave_a_dim else "at most"
            return [f"model.{kind}.rotary_dims={dims} must be {bound} the head width {width}; lower it"]
        return []


def projection_parameters(model: "ModelConfig", head_norms: bool = True) -> int:
    """Queries, keys, values, output, their shifts, norms and the value residual."""
    width = model.num_heads * model.head_width
    count = _matrix_elements(model)
    if model.token_shift:
        count += 3 * width
    if model.value_residual:
        count += width
    if head_norms:
        count += 4 * model.head_width
    return count


def projection_flops(model: "ModelConfig") -> int:
    """Of one token."""
    return 2 * _matrix_elements(model)


def read_flops(model: "ModelConfig", keys: float) -> float:
    """One query per head against `keys` keys and their values."""
    return 4 * model.num_heads * model.head_width * keys


def shift_elements(model: "ModelConfig") -> int:
    """The token that q, k and v hand over."""
    return 3 * model.num_heads * model.head_width if model.token_shift else 0


def window_elements(model: "ModelConfig", tokens: int) -> int:
    """Keys and values of a window."""
    return 2 * model.num_heads * model.head_width * tokens


def _matrix_elements(model: "ModelConfig") -> int:
    width = model.num_heads * model.head_width
    rank = low_rank(model.hidden_size, VALUE_RESIDUAL_FACTOR) if model.value_residual else 0
    return 4 * model.hidden_size * width + rank * (model.hidden_size + width)
