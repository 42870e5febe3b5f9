"""Settings and cost of Gated DeltaNet. Imports no torch."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from models.kinds.delta_rule import DeltaRuleConfig
from models.kinds.recurrence import CHUNK, TAPS, RecurrenceHeads
from models.layer_config import Elements

if TYPE_CHECKING:
    from models.config import ModelConfig


class GatedDeltaNetConfig(DeltaRuleConfig):
    """Gated DeltaNet: the delta rule with one decay a head (arXiv 2412.06464)."""

    implementation: ClassVar[str] = "models.layers.gated_deltanet:GatedDeltaNet"
    op: ClassVar[str] = "chunk_gated_delta_rule"

    expand_v: float = Field(2.0, gt=0, description="width of a head's values over that of its keys")

    def default_key(self, model: "ModelConfig", heads: int) -> int:
        return 3 * model.hidden_size // (4 * heads)

    def control_matrices(self, model: "ModelConfig") -> int:
        heads = self.heads(model)
        return model.hidden_size * (heads.value_width + 2 * heads.number)  # gate; steps and rates

    def vectors(self, model: "ModelConfig") -> int:
        heads = self.heads(model)
        return TAPS * heads.projected + 2 * heads.number + heads.value

    def control_outputs(self, heads: RecurrenceHeads) -> int:
        return 2 * heads.number

    def saved_in_full(self, heads: RecurrenceHeads) -> Elements:
        """The gate, two sets of decayed scores, decays between tokens, stacked keys and queries, copies."""
        scores = 3 * CHUNK * heads.number + 3 * heads.key_width + 7 * heads.number
        projections = self.saved_projections(heads) + 3 * heads.value_width
        return Elements(projections, self.saved_of_rule(heads) + scores)
