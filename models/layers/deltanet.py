"""The DeltaNet mixer."""

from torch import Tensor

from models.layers.delta_rule import DeltaRule
from models.layers.recurrence import Operands


class DeltaNet(DeltaRule):
    """The delta rule of a state that decays by nothing but its writes; reads are normed per head.

    Matrices start as those of the attention kinds.
    """

    def controls(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.rate(x),)

    def log_decay(self, rate: Tensor, *controls: Tensor) -> Tensor:
        return rate.new_zeros(()).expand_as(rate)

    def kernel(self, operands: Operands, state: Tensor) -> tuple[Tensor, Tensor]:
        from fla.ops.delta_rule import chunk_delta_rule

        return self.run_kernel(chunk_delta_rule, operands, state)

    def normed(self, out: Tensor, *gate: Tensor) -> Tensor:
        return self.norm(out)
