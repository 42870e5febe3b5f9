"""What a layer may ask of the tokens before its own, whoever holds them: nobody, a cache, or a rank."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from torch import Tensor

from parallel.sequence.node import Node


class Exchange(Protocol):
    """Raw, non-differentiable point-to-point transport between neighbours along the sequence.

    Used inside one autograd Function, which orders its own messages (the KVM hand-over). Sends return at
    once and keep their buffers until `drain`; receives block, at most the group's time-out. Messages of one
    direction between two ranks arrive in the order sent, and `name` must agree on both sides.
    """

    has_previous: bool
    has_next: bool

    def send_next(self, name: str, tensors: tuple[Tensor, ...]) -> None: ...

    def receive_previous(self, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Tensors of the shapes and dtypes of `like` (whose contents are not read)."""
        ...

    def send_previous(self, name: str, tensors: tuple[Tensor, ...]) -> None: ...

    def receive_next(self, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]: ...


class NoExchange:
    """The exchange of a sequence that lives on one rank."""

    has_previous = False
    has_next = False

    def send_next(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        raise AssertionError(f"{name}: no next rank")

    def receive_previous(self, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        raise AssertionError(f"{name}: no previous rank")

    send_previous = send_next
    receive_next = receive_previous


@dataclass(frozen=True)
class HeadSplit:
    """How a layer whose heads do not see each other hands over what depends on its heads.

    groups: of heads, each in a message of its own: the rank after works on one while this rank works on the
    next. node: ranks that share the serial work of a forward by heads.
    """

    groups: int = 1
    node: Node | None = None

    def of(self, heads: int) -> tuple[slice, ...]:
        """The groups of so many heads, as even as they can be."""
        if self.groups > heads:
            raise ValueError(
                f"{self.groups} groups of {heads} heads: want parallel.head_groups and "
                f"parallel.head_parallel of at most {heads}"
            )
        edges = [heads * group // self.groups for group in range(self.groups + 1)]
        return tuple(slice(start, stop) for start, stop in pairwise(edges))


class CausalAttention(Protocol):
    """Softmax attention in which each token sees those up to itself: whole, and in parts over some keys.

    Queries [B, Q, H, D], keys and values [B, K, H, D]; heads are independent. log-sum-exps have a shape of
    the implementation's choice.
    """

    def whole(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """-> [B, Q, H, D], differentiable. The queries stand at the last Q of the K tokens."""
        ...

    def part(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp over these keys alone. causal: they are the queries' own tokens; otherwise
        all of them come before. Not differentiable, as those below."""
        ...

    def join(self, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The part over the keys of both parts, in float32 at least."""
        ...

    def part_backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sum: Tensor,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value through one part, given what all parts joined gave."""
        ...


class SequenceContext(Protocol):
    """Passed through the backbone into every layer; layers never ask how many ranks there are.

    `name` identifies one exchange within one forward, e.g. `"3.kvm.shift"`.
    """

    start: int  # position in the whole sequence of the first token of this call
    exchange: Exchange  # raw transport, for layers that order their own messages
    head_split: HeadSplit  # for the same layers

    def halo(
        self, name: str, tensors: tuple[Tensor, ...], count: int, keep: int | None = None
    ) -> tuple[Tensor, ...]:
        """The `count` tokens before the local ones, however many ranks hold them.

        tensors: each [B, T, ...]. Returns for each the last min(count, start) earlier tokens [B, n, ...],
        n = 0 at the start of the sequence. Differentiable: the gradient goes back to the rank that holds the
        tokens; so use the result (concatenate it) also when n = 0.
        keep: tokens that a cache keeps and returns instead, if a call that goes on from it needs more than
        `count` because it may start anywhere.
        """
        ...

    def attend(
        self, name: str, attention: CausalAttention, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Attention of the local queries to every token of the sequence up to their own, each
        [B, T, H, D] -> [B, T, H, D]. Differentiable."""
        ...

    def receive(self, name: str, zeros: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The state before the local tokens, or `zeros` at the start of the sequence. Differentiable."""
        ...

    def send(self, name: str, state: tuple[Tensor, ...], tie: Tensor) -> Tensor:
        """Hand on the state after the local tokens. Use the returned `tie` in place of the one given: it
        keeps the send in the autograd graph, so that the gradient of the state comes back."""
        ...

    def load(self, name: str) -> Any:
        """A typed state kept from the call before (caches only); None elsewhere."""
        ...

    def store(self, name: str, state: Any) -> None:
        """Keep a typed state for the next call (caches only); nothing elsewhere."""
        ...

    @property
    def keeps_state(self) -> bool:
        """Whether `store` keeps what it is given."""
        ...


class WholeSequence:
    """The context of a sequence that starts here and lives on one rank: nothing before, nothing kept."""

    start = 0
    exchange: Exchange = NoExchange()
    head_split = HeadSplit()
    keeps_state = False

    def halo(
        self, name: str, tensors: tuple[Tensor, ...], count: int, keep: int | None = None
    ) -> tuple[Tensor, ...]:
        return tuple(tensor[:, :0] for tensor in tensors)

    def attend(
        self, name: str, attention: CausalAttention, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        return attention.whole(query, key, value)

    def receive(self, name: str, zeros: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return zeros

    def send(self, name: str, state: tuple[Tensor, ...], tie: Tensor) -> Tensor:
        return tie

    def load(self, name: str) -> Any:
        return None

    def store(self, name: str, state: Any) -> None:
        pass
