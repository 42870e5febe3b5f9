"""Hugging Face tokenizers, loaded without code of others."""

from typing import Any


def load_tokenizer(name_or_folder: str) -> Any:
    """The tokenizer of a folder or of a name on the Hub. Never runs code that comes with it."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name_or_folder, trust_remote_code=False)
    except Exception as error:  # of every kind: files that others wrote, read by code of others
        reason = str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(
            f"tokenizer {name_or_folder!r} could not be loaded: {reason}; give a folder that holds a "
            "tokenizer.json, or a name on the Hugging Face Hub"
        ) from error
