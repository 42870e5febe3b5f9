"""Tokenizers as files of a Hugging Face folder."""

from pathlib import Path

from kvm_dist.data.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    RWKVWorldTokenizer,
    Tokenizer,
    build_tokenizer,
)
from models.folder.config import OWN_TOKENIZER
from models.folder.tokenizer import write_byte_tokenizer, write_world_tokenizer

NO_TOKENIZER = "none"
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def own_tokenizer(folder: Path) -> Tokenizer | None:
    """The Hugging Face tokenizer whose files lie in `folder`, if any do."""
    return build_tokenizer(str(folder)) if any((folder / name).is_file() for name in _FILES) else None


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> str:
    """Write the files that `AutoTokenizer` loads; how `config.json` names the tokenizer."""
    if isinstance(tokenizer, ByteTokenizer):
        write_byte_tokenizer(folder)
        return tokenizer.name
    if isinstance(tokenizer, RWKVWorldTokenizer):
        write_world_tokenizer(folder, tokenizer.vocabulary_file)
        return tokenizer.name
    assert isinstance(tokenizer, HuggingFaceTokenizer), f"no files are known for a {type(tokenizer).__name__}"
    tokenizer.save(folder)
    return OWN_TOKENIZER
