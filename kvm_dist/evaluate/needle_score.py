"""Whether a model finds needles: greedy answers to prompts of one length."""

from collections.abc import Sequence

import numpy as np
import torch

from kvm_dist.data.tokenizer import Tokenizer
from kvm_dist.evaluate.needle import Prompt
from kvm_dist.evaluate.reading import write_on
from models.backbone import Backbone


def answers(
    model: Backbone, tokenizer: Tokenizer, prompts: Sequence[Prompt], answer_tokens: int
) -> list[str]:
    """What the model puts after each prompt, all of one length and read together: most likely tokens.

    An answer ends once it holds the value, with a separator, or after `answer_tokens` tokens.
    """

    def finished(row: int, ids: list[int]) -> bool:
        return ids[-1] == tokenizer.separator_id or found(prompts[row], tokenizer.decode(ids))

    ids = torch.from_numpy(np.stack([prompt.ids for prompt in prompts]))
    return [tokenizer.decode(answer) for answer in write_on(model, ids, answer_tokens, finished)]


def found(prompt: Prompt, answer: str) -> bool:
    """Whether an answer contains the value."""
    return prompt.value in answer
