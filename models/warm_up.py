"""Compiling what training launches, on one rank alone: before any rank waits for another in a collective."""

import os
import time
from collections.abc import Callable, Iterator

import torch

from models.backbone import Block
from models.budget import FixedBudget, PowerLawBudget
from models.config import KVMConfig, ModelConfig
from models.kvm.kernels.launch import refused_by_compiler
from parallel.sequence.context import SequenceContext, WholeSequence
from parallel.sequence.recorded import ZeroExchange

TOKENS = 1024  # of kinds whose kernels do not depend on how many there are
BUFFERS = "AMDGCN_USE_BUFFER_OPS"  # AMD's compiler asks it
PARAMETER = 0.01  # nothing is learned, and all is finite


def warm_up(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    said: Callable[[str], None] = lambda _: None,
) -> None:
    """Forward and backward of a layer of every kind. Layers of one kind launch the same kernels.

    dtype: of the weights. No random number is drawn. said: is told what is ready. Raises ValueError for
    kernels that this GPU's compiler refuses.
    """
    for kind in dict.fromkeys(config.layer_kinds):
        begun = time.perf_counter()
        own = config.model_copy(update={"layers": [kind], "num_layers": 1})
        try:
            for one, tokens, context in _calls(own, kind):
                _step(one, tokens, context, device, dtype)
        except Exception as error:
            if device.type != "cuda" or not refused_by_compiler(error):
                raise
            raise ValueError(_refusal(kind, config, error)) from error
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        said(f"{kind}: kernels ready after {time.perf_counter() - begun:.0f} s")


def _refusal(kind: str, config: ModelConfig, error: Exception) -> str:
    """Triton 3.6 on ROCm 7 is known to fail at buffer operations of other people's kernels."""
    ways = []
    if kind in config.kinds_with_backends():
        ways.append(f"use model.{kind}.backend=torch")
    if torch.version.hip and os.environ.get(BUFFERS, "1") != "0":
        ways.append(
            f"set {BUFFERS}=0 (slurm.environment), and let `kvm-dist bench kvm --device cuda` check that "
            "results are still right"
        )
    ways.append("try another version of Triton")
    said = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return f"the kernels of {kind} layers do not compile on this GPU ({said}): {', or '.join(ways)}"


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
