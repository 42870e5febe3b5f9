"""A model on its way from one layout into another."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvm_dist.convert.weights import require_finite
from kvm_dist.data.tokenizer import Tokenizer
from kvm_dist.exit_codes import ConfigError
from models.config import ModelConfig
from models.folder.card import CardFacts
from models.folder.config import SpecialTokens


@dataclass(frozen=True)
class ModelContent:
    """Everything that a folder of any layout is written from.

    read: a parameter by our name, on the CPU, in any floating dtype; it is asked for one at a time.
    special: ids of the end of a text, for a model whose tokenizer is not known.
    training_context: tokens of a sequence in training, where that is known.
    """

    origin: Path
    model: ModelConfig
    dtype: torch.dtype
    read: Callable[[str], Tensor]
    tokenizer: Tokenizer | None
    special: SpecialTokens
    facts: CardFacts
    notes: tuple[str, ...] = ()
    training_context: int | None = None

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def tensor(self, name: str) -> Tensor:
        """Parameter `name` in the dtype that is written. Raises DataError if it is not finite."""
        return require_finite(self.origin, name, self.read(name).to(self.dtype))


def separator_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    """The separator ends a text, and the next one begins after it; pads are hidden by a mask anyway."""
    separator = tokenizer.separator_id
    return SpecialTokens(bos=separator, eos=separator, pad=separator)


def require_room(model: ModelConfig, tokenizer: Tokenizer) -> None:
    if tokenizer.vocab_size > model.vocab_size:
        raise ConfigError(
            f"tokenizer {tokenizer.name} has {tokenizer.vocab_size} ids, the model only {model.vocab_size}; "
            "name the tokenizer that made its training data"
        )
