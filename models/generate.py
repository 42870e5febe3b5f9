"""Text from a model: the prompt in one call, then one token at a time from the cache."""

import torch
from torch import Tensor

from models.backbone import Backbone
from models.cache import CachedSequence, read


@torch.no_grad()
def generate(
    model: Backbone, prompt_ids: Tensor, tokens: int, temperature: float, generator: torch.Generator
) -> Tensor:
    """The `tokens` ids that follow prompt_ids [T], drawn at a temperature (0: the most likely) -> [tokens].

    Draws on the CPU from `generator` alone: the global random state is left as it is.
    """
    if prompt_ids.numel() == 0:
        raise ValueError("the prompt is empty; give at least one token")
    cache = CachedSequence()
    chosen: list[Tensor] = []
    next_ids = prompt_ids
    for _ in range(tokens):
        logits = read(model, next_ids.unsqueeze(0), cache)[0, -1]
        next_ids = _choose(logits, temperature, generator).to(prompt_ids.device)
        chosen.append(next_ids)
    return torch.cat(chosen) if chosen else prompt_ids[:0]


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """logits [V] -> one id [1]."""
    if temperature == 0:
        return logits.argmax(keepdim=True)
    probabilities = (logits.float().cpu() / temperature).softmax(-1)
    return torch.multinomial(probabilities, 1, generator=generator)
