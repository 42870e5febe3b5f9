"""Routing split by heads inside a node of ranks; states go from node to node.

1. Every member of a node gives each other member, for its group of the heads, the tokens that it would fold.
2. A member routes its heads over the tokens of all members, and hands S_K on to the member of the next node
   that has the same heads, then S_V and the magnitudes.
3. It gives each member the routes of its tokens and the state before them. All attend to their own tokens.

A node is as long in the chain as one rank without nodes, and the chain has as many links as there are nodes.
The backward hands over from rank to rank: what blocks send to the slots is too much to give to other ranks.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.kvm.call import Call, CallTensors, Passes, Routes
from models.kvm.layout import Plan, plan_call
from models.kvm.rewind import SlotTensors
from parallel.sequence.context import HeadSplit
from parallel.sequence.node import Node


@dataclass
class _Routed:
    """What a member needs to attend: where its folds go, and the state before them."""

    routes: Routes
    slots: list[Tensor]


def advance_by_heads(
    call: Call, given: CallTensors, passes: Passes, node: Node
) -> tuple[Routes, CallTensors]:
    """Routes of this rank's folds, and its tensors with the state before them."""
    groups = HeadSplit(node.size).of(given.heads)
    plans = [_folds_of(call, node, member) for member in node.members]
    own = plans[node.place]
    if node.spans[node.rank] != (call.plan.start, call.plan.stop) or own.folds != call.plan.folds:
        raise ValueError(
            f"tokens [{call.plan.start}, {call.plan.stop}) on a rank that holds {node.spans[node.rank]}; "
            "give the context the spans of all ranks"
        )
    count = groups[node.place].stop - groups[node.place].start
    before = _slots_like(given, count, plans[0].slots_start)
    found = _route(_pieces(call, given, node, groups, plans), before, node)
    empty = given.norm_weight.new_empty(0)
    like = []
    for heads in groups:
        count = heads.stop - heads.start
        shapes = (empty.new_empty(shape, dtype=torch.int32) for shape in passes.routes_shapes(count))
        like.append((*shapes, *_slots_like(given, count, own.slots_start)))
    parts = [(*one.routes, *one.slots) for one in found]
    received = node.swap("kvm.node.routes", parts, like)
    routes = passes.join_routes([one[:-3] for one in received])
    keys, values, magnitudes = (
        torch.cat(one, dim=2) for one in zip(*(one[-3:] for one in received), strict=True)
    )
    return routes, replace(given, slot_keys=keys, slot_values=values, slot_magnitudes=magnitudes)


def _folds_of(call: Call, node: Node, member: int) -> Plan:
    """The folds of a sequence rank without its blocks, over the tokens that it folds."""
    start, stop = node.spans[member]
    plan = plan_call(
        call.settings,
        start,
        stop,
        ahead_at_start=member > 0,
        ahead_at_stop=member < len(node.spans) - 1,
    )
    return Plan(
        plan.covered_start,
        plan.covered_stop,
        plan.covered_start,
        plan.covered_stop,
        plan.slots_start,
        (),
        plan.folds,
    )


def _pieces(
    call: Call, given: CallTensors, node: Node, groups: tuple[slice, ...], plans: list[Plan]
) -> list[Passes]:
    """Passes over the folds of every member, of the heads of this one."""
    own = plans[node.place]
    tokens = [
        one.span(own.start, own.stop) if own.folds else one.local[:, :0]
        for one in given.tokens(call.plan.start)
    ]
    parts = [tuple(one[:, :, heads] for one in tokens) for heads in groups]
    like = [
        tuple(one.new_empty(len(one), plan.stop - plan.start, *one.shape[2:]) for one in parts[node.place])
        for plan in plans
    ]
    pieces = []
    for plan, (k, v, *gate) in zip(plans, node.swap("kvm.node.tokens", parts, like), strict=True):
        tensors = CallTensors(
            k, k, v, gate[0] if gate else None, given.norm_weight, given.norm_bias, None, None
        )
        pieces.append(call.passes(replace(call, plan=plan), tensors))
    return pieces


def _route(pieces: list[Passes], before: SlotTensors, node: Node) -> list[_Routed]:
    """Route and sum over the tokens of the node, S_K first: it is all that the next node waits for.

    before: as the state before the node; no slots in the first.
    """
    every = slice(0, before[0].shape[2])
    keys = node.receive_previous("kvm.keys", before[:1])[0] if node.has_previous else before[0]
    found = []
    for piece in pieces:
        routes, after = piece.route(every, keys)
        found.append(_Routed(routes, [keys]))
        keys = after
    if node.has_next:
        node.send_next("kvm.keys", (keys,))
    values = node.receive_previous("kvm.values", before[1:]) if node.has_previous else before[1:]
    for piece, routed in zip(pieces, found, strict=True):
        routed.slots += values
        values = piece.sum_values(every, routed.routes, values[0], values[1])
    if node.has_next:
        node.send_next("kvm.values", values)
    return found


def _slots_like(given: CallTensors, heads: int, slots: int) -> SlotTensors:
    batch, _, _, width = given.k.shape
    keys, values = (given.norm_weight.new_empty(slots, batch, heads, width) for _ in range(2))
    return keys, values, keys.new_empty(keys.shape[:3])
