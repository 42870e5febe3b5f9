"""What the settings and the costs of all attention kinds share. Imports no torch."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from models.layer_config import Elements, LayerConfig, low_rank

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
    rotary_base: float | None = Field(None, gt=0, description="null: model.rotary_base")

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


def projection_parameters(model: "ModelConfig", head_norms: bool = True, kv_heads: int | None = None) -> int:
    """Queries, keys, values, output, their shifts, norms and the value residual.

    kv_heads, here and below: heads of the keys and values; None: as many as queries have.
    """
    count = _matrix_elements(model, kv_heads)
    if model.token_shift:
        count += shift_elements(model, kv_heads)
    if model.value_residual:
        count += _kv_width(model, kv_heads)
    if head_norms:
        count += 4 * model.head_width
    return count


def projection_flops(model: "ModelConfig", kv_heads: int | None = None) -> int:
    """Of one token."""
    return 2 * _matrix_elements(model, kv_heads)


def saved_elements(model: "ModelConfig", kv_heads: int | None = None) -> Elements:
    """Kept for the backward of one token: what queries, keys and values are made from, they, and the reads.

    The input, the shifts, both operands of the value residual, inputs of the head norms with their two
    moments, the read's operands, its output and log-sum-exp. Recomputation keeps the projections instead of
    all that lies between them and the reads.
    """
    width, heads = model.num_heads * model.head_width, model.num_heads
    kv_width = _kv_width(model, kv_heads)
    if model.activation_checkpointing:
        return Elements(model.hidden_size + 3 * width + 4 * kv_width, heads)
    elements = model.hidden_size + 3 * width + 3 * kv_width + shift_elements(model, kv_heads)
    if model.value_residual:
        elements += 2 * kv_width + low_rank(model.hidden_size, VALUE_RESIDUAL_FACTOR)
    return Elements(elements, 3 * heads + 2 * (kv_heads or heads))


def saved_windows(model: "ModelConfig", window_blocks: float) -> Elements:
    """Kept besides where blocks of queries read `window_blocks` blocks of keys and values each: copies of
    their ranges, and the output before and after it is put together."""
    return Elements(int(model.num_heads * model.head_width * (2 * window_blocks + 1)))


def read_flops(model: "ModelConfig", keys: float) -> float:
    """One query per head against `keys` keys and their values."""
    return 4 * model.num_heads * model.head_width * keys


def shift_elements(model: "ModelConfig", kv_heads: int | None = None) -> int:
    """The token that q, k and v hand over."""
    if not model.token_shift:
        return 0
    return model.num_heads * model.head_width + 2 * _kv_width(model, kv_heads)


def window_elements(model: "ModelConfig", tokens: int, kv_heads: int | None = None) -> int:
    """Keys and values of a window."""
    return 2 * _kv_width(model, kv_heads) * tokens


def _matrix_elements(model: "ModelConfig", kv_heads: int | None) -> int:
    width, kv_width = model.num_heads * model.head_width, _kv_width(model, kv_heads)
    rank = low_rank(model.hidden_size, VALUE_RESIDUAL_FACTOR) if model.value_residual else 0
    return 2 * model.hidden_size * (width + kv_width) + rank * (model.hidden_size + kv_width)


def _kv_width(model: "ModelConfig", kv_heads: int | None) -> int:
    return (kv_heads or model.num_heads) * model.head_width
