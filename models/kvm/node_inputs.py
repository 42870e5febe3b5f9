"""Queries, keys, values and gates between the members of a node, on their way while ranks compute.

What is started first is needed first: keys are routed while queries are on their way, and the gradients of
queries leave before those of keys are summed.
"""

from torch import Tensor

from parallel.sequence.context import HeadSplit
from parallel.sequence.heads import HeadRanks, HeadSwap
from parallel.sequence.node import Node


class NodeInputs:
    """The tensors of one call on their way to the members that take their heads.

    state_heads: of keys, values and gate.
    """

    def __init__(self, node: Node, state_heads: int) -> None:
        self.node = node
        self.ranks = HeadRanks(node.all_to_all, node.place, tuple(node.lengths), state_heads)
        self._swaps: dict[str, HeadSwap] = {}

    def start(self, name: str, local: Tensor) -> Tensor:
        """[B, T, heads, ...] of this rank's tokens -> [B, tokens of the node, own heads, ...], to be filled.

        name: query, key, value or gate. Differentiable.
        """
        start, stop = self.node.spans[self.node.rank]
        if local.shape[1] != stop - start:
            raise ValueError(
                f"{local.shape[1]} tokens on a rank that holds {(start, stop)}; give the context the spans "
                "of all ranks"
            )
        swap = self._swaps[name] = HeadSwap(self.ranks, f"kvm.node.{name}", to_heads=True)
        (whole,) = swap.start((local,))
        return whole

    def wait_for_tokens(self) -> None:
        for name, swap in self._swaps.items():
            if name != "query":
                swap.land()

    def wait_for_queries(self) -> None:
        self._swaps["query"].land()

    def return_queries(self, gradient: Tensor) -> None:
        if self._swaps["query"].has_gradient:
            self._swaps["query"].start_back((gradient,))

    def return_tokens(self, key: Tensor | None, value: Tensor | None, gate: Tensor | None) -> None:
        # As autograd waits for them: what was started last comes first.
        for name, gradient in (("value", value), ("key", key), ("gate", gate)):
            if gradient is not None:
                self._swaps[name].start_back((gradient,))

    @classmethod
    def of(cls, split: HeadSplit, state_heads: int) -> "NodeInputs | None":
        """None where no node splits the operator."""
        node = split.node
        return cls(node, state_heads) if node is not None and node.splits == "operator" else None
