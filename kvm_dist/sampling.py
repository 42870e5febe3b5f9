"""Text from a model on disk."""

from collections.abc import Sequence
from pathlib import Path

import torch

from kvm_dist.evaluate.session import continuation
from kvm_dist.exit_codes import ConfigError
from kvm_dist.pretrained import open_pretrained

_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def readable(text: str) -> str:
    """`text` for a terminal: pictures stand for control characters, which would reprogram it."""
    return text.translate(_PICTURES)


def sample(
    path: Path, prompt: str, tokens: int, temperature: float, seed: int, overrides: Sequence[str] = ()
) -> str:
    """What the model of `path`, its configuration changed (see `open_pretrained`), writes after `prompt`.

    Raises StorageError if there is no valid checkpoint, ConfigError for an empty prompt.
    """
    if not prompt:
        raise ConfigError("--prompt is empty; give at least one character to go on from")
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):  # how Python passes on other bytes
        raise ConfigError(f"--prompt {prompt!r} is no text in UTF-8; give it in that encoding")
    opened = open_pretrained(path, overrides)
    generator = torch.Generator().manual_seed(seed)
    return prompt + continuation(
        opened.model, opened.tokenizer, prompt, tokens, temperature, generator, opened.device
    )
