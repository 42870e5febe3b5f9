"""Hugging Face tokenizers, loaded without code of others."""

from typing import Any


def load_tokenizer(name_or_folder: str) -> Any:
    """The tokenizer of a folder or of a name on the Hub. Never runs code that comes with it."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name_or_folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer {name_or_folder!r} could not be loaded: {error}; give a folder that holds a "
            "tokenizer.json, or a name on the Hugging Face Hub"
        ) from error
