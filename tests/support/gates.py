"""Gates that prove who waits for whom: a rank stands still until another one has come to some point.

No clock decides: a test passes if every gate is opened, and fails with the gate's name if one never is.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

from torch import nn

from models.backbone import Backbone, Block
from models.kvm import torch_passes
from models.layers import block_window, chunk_recurrence, ovq, sliding_window
from models.layers.attention import AttentionMixer


class Gates(Protocol):
    """Named gates, closed until one rank opens them, for all ranks."""

    def open(self, name: str) -> None: ...

    def wait(self, name: str) -> None:
        """Returns once the gate is open; raises TimeoutError with its name if it stays closed."""
        ...


class ThreadGates:
    """Gates between the logical ranks of one process."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._opened: set[str] = set()
        self._changed = threading.Condition()

    def open(self, name: str) -> None:
        with self._changed:
            self._opened.add(name)
            self._changed.notify_all()

    def wait(self, name: str) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: name in self._opened, self._timeout_seconds):
                raise TimeoutError(f"gate {name!r} was never opened")


class FileGates:
    """Gates between processes: an open gate is a file, so that no transport of the ranks takes part."""

    def __init__(self, folder: Path, timeout_seconds: float) -> None:
        self._folder = folder
        self._timeout_seconds = timeout_seconds

    def open(self, name: str) -> None:
        (self._folder / name.replace(" ", "_")).touch()

    def wait(self, name: str) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        while not (self._folder / name.replace(" ", "_")).exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"gate {name!r} was never opened")
            time.sleep(0.001)


class Places:
    """Where a rank is in its model, and the rule by which it stands still there.

    A gate opens at the beginning of every layer, forward and backward. The embedding counts as layer -1 and
    the head as the layer after the last. Rules, of a pass forward (backward the same with the ranks turned
    round):

    - "reads": nobody reads its window or state before the rank after has begun the next layer, that is,
      before all that the rank after needs of this layer has reached it. Only without token shift in the
      feed-forward part, which hands over a token that attention has made.
    - "layers": nobody begins the feed-forward computation of a layer, after its token shift, before the rank
      after has begun the next layer.
    - "starts": nobody begins before the rank before has come to the end of its last layer.
    """

    def __init__(self, model: Backbone, rank: int, ranks: int, gates: Gates) -> None:
        self._rank, self._ranks, self._gates = rank, ranks, gates
        self._rule, self._micro_batch = "", ""
        self._layers = len(model.layers)
        self._open_at(model.norm_embedding, model.norm_embedding, -1)
        for index, block in enumerate(model.layers):
            assert isinstance(block, Block)
            self._open_at(block.norm_mixer, block, index)  # the norm: the first values come before the block
            self._hold_layer(model, block, index)
        self._open_at(model.norm_head, model.norm_head, self._layers)
        self._hold_starts(model)

    def begin(self, rule: str, micro_batch: str) -> None:
        """Of the next forward and backward; to be called in the thread that runs the forward."""
        self._rule, self._micro_batch = rule, micro_batch
        _here.places = self

    def before_read(self) -> None:
        """Called by the operators that read what lies before a token."""
        if self._rule == "reads":
            self._wait_for_next(_here.layer + 1)

    def _wait_for_next(self, layer: int) -> None:
        if self._rank < self._ranks - 1:
            self._gates.wait(self._gate("forward", layer, self._rank + 1))

    def _wait_for_previous(self, layer: int) -> None:
        if self._rank > 0:
            self._gates.wait(self._gate("backward", layer, self._rank - 1))

    def _gate(self, phase: str, layer: int, rank: int) -> str:
        return f"{self._micro_batch} rank {rank} begins layer {layer} {phase}"

    def _open_at(self, first: nn.Module, last: nn.Module, layer: int) -> None:
        def forward(*_: Any) -> None:
            _here.layer = layer
            self._gates.open(self._gate("forward", layer, self._rank))

        def backward(*_: Any) -> None:
            self._gates.open(self._gate("backward", layer, self._rank))

        first.register_forward_pre_hook(forward)
        last.register_full_backward_pre_hook(backward)

    def _hold_layer(self, model: Backbone, block: Block, index: int) -> None:
        def forward(*_: Any) -> None:
            if self._rule == "layers":
                self._wait_for_next(index + 1)

        def backward(*_: Any) -> None:
            if self._rule == "layers":
                self._wait_for_previous(index - 1)

        def before_projections(*_: Any) -> None:
            if self._rule == "reads":
                self._wait_for_previous(index - 1)

        block.feed_forward.expand.register_forward_pre_hook(forward)
        if model.config.layer_kinds.index(block.mixer.kind) < index:  # the first one owes first values too
            block.norm_mixer.register_full_backward_pre_hook(backward)
            _last_after_messages(block).register_full_backward_pre_hook(before_projections)

    def _hold_starts(self, model: Backbone) -> None:
        def forward(*_: Any) -> None:
            if self._rule == "starts" and self._rank > 0:
                self._gates.wait(self._gate("forward", self._layers, self._rank - 1))

        def backward(*_: Any) -> None:
            if self._rule == "starts" and self._rank < self._ranks - 1:
                self._gates.wait(self._gate("backward", -1, self._rank + 1))

        model.embedding.register_forward_pre_hook(forward)
        model.head.register_full_backward_pre_hook(backward)


def _last_after_messages(block: Block) -> nn.Module:
    """A module whose backward comes after all that the mixer sends if q, k and v are not shifted."""
    if isinstance(block.mixer, AttentionMixer):
        return block.mixer.projections.query
    return block.norm_mixer  # recurrences send their last gradients before it


class _Here(threading.local):
    places: Places | None = None
    layer: int = -1


_here = _Here()  # one rank a thread
READS = (
    (torch_passes, "attend"),
    (chunk_recurrence, "read"),
    (ovq, "read_chunk"),
    (sliding_window, "blocked_attention"),
    (block_window, "blocked_attention"),
)


@contextmanager
def watched_reads() -> Iterator[None]:
    """Inside, every operator stops at `Places.before_read` of the rank that calls it."""
    with ExitStack() as stack:
        for module, name in READS:
            stack.enter_context(patch.object(module, name, _watched(getattr(module, name))))
        yield


def _watched(read: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        if _here.places is not None:
            _here.places.before_read()
        return read(*args, **kwargs)

    return called
