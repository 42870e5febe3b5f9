"""Text from a model: the prompt in one call, then one token at a time from the cache."""

import torch
from torch import Tensor

from models.backbone import Backbone
from models.cache import CachedSequence, read_last


@torch.no_grad()
def generate(
    model: Backbone, prompt_ids: Tensor, tokens: int, temperature: float, generator: torch.Generator
) -> Tensor:
    """The `tokens` ids that follow prompt_ids [T], drawn at a temperature (0: the most likely) -> [tokens].

    Draws on the CPU from `generator` alone: the global random state is left as it is.
    """
    if prompt_ids.numel() == 0:
        raise ValueError("the prompt is empty; give at least one token")
    if tokens == 0:
        return prompt_ids[:0]
    cache = CachedSequence()
    logits = read_last(model, prompt_ids.unsqueeze(0), cache)[0]
    return go_on(model, cache, logits, tokens, temperature, generator)


@torch.no_grad()
def go_on(
    model: Backbone,
    cache: CachedSequence,
    logits: Tensor,
    tokens: int,
    temperature: float,
    generator: torch.Generator,
) -> Tensor:
    """The `tokens` ids, at least one, after what a cache of one sequence holds -> [tokens].

    logits: [V] of the last token that was read. See `generate`.
    """
    chosen = [_choose(logits, temperature, generator)]
    while len(chosen) < tokens:
        logits = read_last(model, chosen[-1].to(logits.device).unsqueeze(0), cache)[0]
        chosen.append(_choose(logits, temperature, generator))
    return torch.cat(chosen).to(logits.device)


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """logits [V] -> one id [1]."""
    if temperature == 0:
        return logits.argmax(keepdim=True)
    probabilities = (logits.float().cpu() / temperature).softmax(-1)
    return torch.multinomial(probabilities, 1, generator=generator)
