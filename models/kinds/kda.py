"""Settings and cost of Kimi Delta Attention. Imports no torch."""

from typing import TYPE_CHECKING, ClassVar

from models.kinds.delta_rule import DeltaRuleConfig
from models.kinds.recurrence import TAPS, RecurrenceHeads
from models.layer_config import Elements

if TYPE_CHECKING:
    from models.config import ModelConfig

PAIRS = 16  # numbers a channel kept of the pairs within a smallest block, one for each decay and product


class KDAConfig(DeltaRuleConfig):
    """Kimi Delta Attention: the delta rule with a decay for every channel of a key (arXiv 2510.26692)."""

    implementation: ClassVar[str] = "models.layers.kda:KDA"
    op: ClassVar[str] = "chunk_kda"

    def default_key(self, model: "ModelConfig", heads: int) -> int:
        return model.hidden_size // heads

    def control_matrices(self, model: "ModelConfig") -> int:
        """Decays and gate of one low rank, a head's value width, and rates."""
        width, heads = model.hidden_size, self.heads(model)
        return heads.value * (2 * width + heads.key_width + heads.value_width) + width * heads.number

    def vectors(self, model: "ModelConfig") -> int:
        heads = self.heads(model)
        decay, gate, norm = heads.number + heads.key_width, heads.value_width, heads.value
        return TAPS * heads.projected + decay + gate + norm

    def control_outputs(self, heads: RecurrenceHeads) -> int:
        return heads.key_width + heads.number

    def saved_in_full(self, heads: RecurrenceHeads) -> Elements:
        """The gate, steps, pairs within the smallest blocks, and the factors of the blocks below them."""
        scores = (PAIRS + 15) * heads.key_width
        projections = self.saved_projections(heads) + 2 * heads.value_width + 2 * heads.value
        return Elements(projections, self.saved_of_rule(heads) + scores)
