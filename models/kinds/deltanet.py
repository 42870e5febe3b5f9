"""Settings and cost of DeltaNet. Imports no torch."""

from typing import TYPE_CHECKING, ClassVar

from models.kinds.delta_rule import DeltaRuleConfig
from models.kinds.recurrence import CHUNK, TAPS, RecurrenceHeads
from models.layer_config import Elements

if TYPE_CHECKING:
    from models.config import ModelConfig


class DeltaNetConfig(DeltaRuleConfig):
    """DeltaNet: the delta rule without decay and without an output gate (arXiv 2406.06484)."""

    implementation: ClassVar[str] = "models.layers.deltanet:DeltaNet"
    op: ClassVar[str] = "chunk_delta_rule"
    refused_dtypes: ClassVar[tuple[str, ...]] = ("float64", "float32")

    def default_key(self, model: "ModelConfig", heads: int) -> int:
        return model.hidden_size // heads

    def control_matrices(self, model: "ModelConfig") -> int:
        return model.hidden_size * self.heads(model).number  # rates

    def vectors(self, model: "ModelConfig") -> int:
        heads = self.heads(model)
        return TAPS * heads.projected + heads.value

    def control_outputs(self, heads: RecurrenceHeads) -> int:
        return heads.number - heads.value_width

    def saved_in_full(self, heads: RecurrenceHeads) -> Elements:
        """As Gated DeltaNet, without steps and gate, and decays that need no gradient."""
        scores = CHUNK * heads.number + heads.key_width + 2 * heads.number
        return Elements(self.saved_projections(heads), self.saved_of_rule(heads) + scores)
