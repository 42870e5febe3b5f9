"""What a layer may ask of the tokens before its own, whoever holds them: nobody, a cache, or a rank."""

from typing import Any, Protocol

from torch import Tensor


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


class SequenceContext(Protocol):
    """Passed through the backbone into every layer; layers never ask how many ranks there are.

    `name` identifies one exchange within one forward, e.g. `"3.kvm.shift"`.
    """

    start: int  # position in the whole sequence of the first token of this call
    exchange: Exchange  # raw transport, for layers that order their own messages

    def halo(self, name: str, tensors: tuple[Tensor, ...], count: int) -> tuple[Tensor, ...]:
        """The `count` tokens before the local ones.

        tensors: each [B, T, ...]. Returns for each the last min(count, start) earlier tokens [B, n, ...],
        n = 0 at the start of the sequence. Differentiable: the gradient goes back to the rank that holds the
        tokens; so use the result (concatenate it) also when n = 0.
        """
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
    keeps_state = False

    def halo(self, name: str, tensors: tuple[Tensor, ...], count: int) -> tuple[Tensor, ...]:
        return tuple(tensor[:, :0] for tensor in tensors)

    def receive(self, name: str, zeros: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return zeros

    def send(self, name: str, state: tuple[Tensor, ...], tie: Tensor) -> Tensor:
        return tie

    def load(self, name: str) -> Any:
        return None

    def store(self, name: str, state: Any) -> None:
        pass
