"""Compiling what training launches, on one rank alone: before any rank waits for another in a collective."""

import time
from collections.abc import Callable, Iterator

import torch

from models.backbone import Block
from models.budget import FixedBudget, PowerLawBudget
from models.config import KVMConfig, ModelConfig
from parallel.sequence.context import SequenceContext, WholeSequence
from parallel.sequence.recorded import ZeroExchange

TOKENS = 1024  # of kinds whose kernels do not depend on how many there are
PARAMETER = 0.01  # nothing is learned, and all is finite


def warm_up(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    said: Callable[[str], None] = lambda _: None,
) -> None:
    """Forward and backward of a layer of every kind. Layers of one kind launch the same kernels.

    dtype: of the weights. No random number is drawn. said: is told what is ready.
    """
    for kind in dict.fromkeys(config.layer_kinds):
        begun = time.perf_counter()
        own = config.model_copy(update={"layers": [kind], "num_layers": 1})
        for one, tokens, context in _calls(own, kind):
            _step(one, tokens, context, device, dtype)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        said(f"{kind}: kernels ready after {time.perf_counter() - begun:.0f} s")


class _BetweenRanks(WholeSequence):
    """The context of a shard with neighbours that send zeros."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.exchange = ZeroExchange(has_previous=True, has_next=True)


def _calls(model: ModelConfig, kind: str) -> Iterator[tuple[ModelConfig, int, SequenceContext]]:
    """A model of one layer, tokens, and where they stand."""
    config = model.layer_config(kind)
    if not isinstance(config, KVMConfig):
        yield model, TOKENS, WholeSequence()
        return
    # Chunks fold once they have left the window. Some budgets append at every fold, some at none, and many
    # stop to append long after a few chunks: kernels are the same.
    tokens = (config.window_chunks + 3) * config.chunk
    for budget in (config.budget, PowerLawBudget(), FixedBudget(slots=config.chunk)):
        changed = config.model_copy(update={"budget": budget, "max_slots": None})
        yield model.model_copy(update={kind: changed}), tokens, WholeSequence()
    yield model, tokens, _BetweenRanks(tokens)


def _step(
    model: ModelConfig, tokens: int, context: SequenceContext, device: torch.device, dtype: torch.dtype
) -> None:
    with torch.device("meta"):
        block = Block(model, 0)
    block.to(dtype).to_empty(device=device)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.fill_(PARAMETER)
    x = torch.linspace(-1, 1, tokens * model.hidden_size, dtype=dtype, device=device)
    x = x.view(1, tokens, -1).requires_grad_()
    block(x, block.first_value(x, context), context).sum().backward()
