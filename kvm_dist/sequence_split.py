"""The part of every sequence that this rank holds, and the context its layers get."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvm_dist.rounds import Round, in_first_half, one_way, two_way
from models.loss import IGNORED_LABEL
from models.sequence_shards import SequenceShards
from parallel.config import NodeSplits
from parallel.mesh import Mesh
from parallel.sequence.all_to_all import GroupAllToAll
from parallel.sequence.context import Exchange, HeadSplit, SequenceContext, WholeSequence
from parallel.sequence.exchange import RankExchange
from parallel.sequence.named import NamedExchange, named_split
from parallel.sequence.node import Node
from parallel.sequence.ranks import RankedSequence
from parallel.sequence.truncated import TruncatedExchange
from parallel.sequence.two_way import Meeting, MeetingExchange

PAD_TOKEN = 0  # any token does: nothing is learned from pads and nothing comes after them


class SequenceSplit:
    """Tokens [start, stop) of each sequence belong to this rank; those from `sequence_length` on are pads.

    Pads fill the last block, so that a shard is whole blocks. They come last and have no label: no token
    reads them, no state that a token reads holds them, and neither loss nor counts see them.

    truncate_gradients: states travel over the shard edges, their gradients do not. head_groups: messages in
    which layers hand over a state. head_parallel: ranks of a node, which splits by heads what `node_splits`
    says. alternate: micro-batches 1, 3, 5, ... of a step lie on the ranks the other way round, shard r on
    rank R - 1 - r: who ends the backward of one first begins the forward of the next at once. in_two_ways:
    they do so in pairs, both at the same time.
    """

    def __init__(
        self,
        mesh: Mesh,
        shards: SequenceShards,
        *,
        truncate_gradients: bool = False,
        head_groups: int = 1,
        head_parallel: int = 1,
        node_splits: NodeSplits = "operator",
        alternate: bool = False,
        in_two_ways: bool = False,
    ) -> None:
        if len(shards.spans) != mesh.sequence_size:
            raise ValueError(f"{len(shards.spans)} shards for {mesh.sequence_size} sequence ranks")
        self.mesh = mesh
        self.sequence_length = shards.tokens
        self.spans = shards.spans
        self.start, self.stop = self.spans[mesh.sequence_rank]
        self.device: torch.device = mesh.world.device
        self._truncates = truncate_gradients
        self._two_way, self._node_ranks = in_two_ways and mesh.sequence_size > 1, head_parallel
        self._ways: list[_Way] = []
        self._meeting = Meeting()
        if mesh.sequence_size > 1:
            meshes = (mesh, mesh.turned()) if alternate or in_two_ways else (mesh,)
            heads = (head_groups, head_parallel, node_splits)
            meeting = self._meeting if in_two_ways else None
            self._ways = [_Way.along(one, self.spans, meeting, *heads) for one in meshes]

    def inputs(self, tokens: Tensor, micro_batch: int = 0) -> Tensor:
        """[b, T] of the whole sequence -> [b, tokens of this rank], on its device."""
        return self._local(tokens, PAD_TOKEN, micro_batch)

    def labels(self, labels: Tensor, micro_batch: int = 0) -> Tensor:
        """[b, T] of the whole sequence -> [b, tokens of this rank], on its device; pads have none."""
        return self._local(labels, IGNORED_LABEL, micro_batch)

    def context(self, micro_batch: int | None = None) -> SequenceContext:
        """A fresh context for one forward; micro_batch: which of a step, as its messages will say."""
        if not self._ways:
            return WholeSequence()
        way = self._way(micro_batch or 0)
        suffix = "" if micro_batch is None else f"of micro-batch {micro_batch}"
        exchange: Exchange = NamedExchange(way.messages, suffix=suffix) if suffix else way.messages
        if self._truncates:  # keys go from rank to rank, where their gradients can end
            exchange = TruncatedExchange(exchange, self.device)
        return RankedSequence(
            way.mesh,
            way.start,
            exchange,
            self.spans,
            None if self._truncates else way.all_to_all,
            head_split=named_split(way.head_split, suffix=suffix),
        )

    def rounds(self, micro_batches: int) -> Iterator[Round]:
        """The micro-batches of a step in the order in which this rank runs them."""
        if not self._two_way:
            yield from one_way(micro_batches)
            return
        mesh = self.mesh
        for one in two_way(micro_batches, mesh.sequence_rank, mesh.sequence_size, self._node_ranks):
            if len(one.forwards) > 1:
                self._meeting.open()
            yield one
            self._meeting.close()

    @property
    def waited_seconds(self) -> float:
        """How long this rank has waited for other ranks so far."""
        return sum((one.waited_seconds for way in self._ways for one in way.transports), 0.0)

    @property
    def bytes_kept(self) -> int:
        """In buffers of messages that may be on their way."""
        return sum(way.exchange.bytes_kept for way in self._ways)

    def release(self) -> None:
        """After a micro-batch: wait until every message of those before it has left."""
        for way in self._ways:
            way.exchange.release()

    def drain(self) -> None:
        """Wait until every message that this rank sent has left."""
        for way in self._ways:
            way.exchange.drain()

    def span(self, micro_batch: int = 0) -> tuple[int, int]:
        """[start, stop) of this rank."""
        return self.spans[self._way(micro_batch).mesh.sequence_rank] if self._ways else self.spans[0]

    def _way(self, micro_batch: int) -> "_Way":
        return self._ways[micro_batch % len(self._ways)]

    def _local(self, tokens: Tensor, padding: int, micro_batch: int) -> Tensor:
        if tokens.shape[1] != self.sequence_length:
            raise ValueError(
                f"sequences of {tokens.shape[1]} tokens; this split is of {self.sequence_length}"
            )
        start, stop = self.span(micro_batch)
        pads = max(0, stop - self.sequence_length)
        return pad(tokens[:, start:stop], (0, pads), value=padding).to(self.device)


@dataclass(frozen=True)
class _Way:
    """How a sequence lies on the ranks of a row, from one of its ends or from the other."""

    mesh: Mesh
    start: int
    exchange: RankExchange
    messages: RankExchange | MeetingExchange  # over `exchange`, where halves meet
    all_to_all: GroupAllToAll
    members: GroupAllToAll | None  # of the node
    head_split: HeadSplit

    @property
    def transports(self) -> tuple[RankExchange | GroupAllToAll, ...]:
        return (self.exchange, self.all_to_all, *(() if self.members is None else (self.members,)))

    @classmethod
    def along(
        cls,
        mesh: Mesh,
        spans: tuple[tuple[int, int], ...],
        meeting: Meeting | None,
        head_groups: int,
        head_parallel: int,
        node_splits: NodeSplits,
    ) -> "_Way":
        exchange = RankExchange(mesh)
        messages: RankExchange | MeetingExchange = exchange
        if meeting is not None:
            ranks, own = mesh.sequence_size, mesh.world.rank
            halves = [in_first_half(place, ranks, head_parallel) for place in range(ranks)]
            messages = MeetingExchange(
                exchange, meeting, mesh, lambda rank: halves[rank % ranks] != halves[own % ranks]
            )
        head_split, members = HeadSplit(head_groups), None
        if head_parallel > 1:
            members = GroupAllToAll(mesh, mesh.node)
            node = Node(messages, members, mesh.sequence_rank, head_parallel, tuple(spans), node_splits)
            # Where only routing is split, gradients of states go from rank to rank: by groups, ranks wait no
            # longer than nodes.
            groups = max(head_groups, head_parallel) if node_splits == "routing" else head_groups
            head_split = HeadSplit(groups, node)
        row = GroupAllToAll(mesh, mesh.row)
        return cls(mesh, spans[mesh.sequence_rank][0], exchange, messages, row, members, head_split)
