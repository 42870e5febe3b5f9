"""The whole operator split by heads inside a node of ranks; states go from node to node.

Every member gives each other member, for its group of the heads, the queries, keys, values and gates of its
tokens; runs the operator on its own heads and the tokens of all members, as one rank of a sequence that has
the nodes for ranks; and gives the outputs back. The backward goes the same ways in reverse, so that both
directions have as many links as there are nodes. Heads do not see each other: nothing changes but who
computes.
"""

from collections.abc import Callable

from torch import Tensor

from models.kvm.compiled import Tensors
from models.kvm.node_inputs import NodeInputs
from parallel.sequence.context import Exchange, HeadSplit
from parallel.sequence.heads import HeadSwap
from parallel.sequence.node import Node, NodeExchange

Place = tuple[Exchange, int, HeadSplit]
OUTPUTS = "kvm.node.outputs"


def attend_by_heads(
    tensors: Tensors,
    inputs: NodeInputs | None,
    node: Node,
    groups: int,
    attend: Callable[[Tensors, Place, NodeInputs], Tensor],
) -> Tensor:
    """Outputs [B, T, H, D] of this rank's tokens.

    tensors: as `kvm_attention` takes them. inputs: those that q, k, v and gate are on their way with; None if
    they are this rank's. attend: the operator. groups: of this member's heads, in which it hands over their
    state.
    """
    q, k, v, gate, norm_weight, norm_bias, *temperatures = tensors
    if inputs is None:
        inputs = NodeInputs(node, k.shape[2])
        gate = None if gate is None else inputs.start("gate", gate)
        k, v, q = (inputs.start(name, one) for name, one in (("key", k), ("value", v), ("query", q)))
    own = inputs.ranks.groups[node.place]
    of_state, of_window = (None if one is None else one[own] for one in temperatures)
    given = (q, k, v, gate, norm_weight, norm_bias, of_state, of_window)
    output = attend(given, (NodeExchange(node), node.start, HeadSplit(groups)), inputs)
    outward = HeadSwap(inputs.ranks, OUTPUTS, to_heads=False)
    (local,) = outward.start((output,))
    outward.land()
    return local
