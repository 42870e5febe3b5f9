"""Tokenizers as files of a Hugging Face folder."""

from pathlib import Path

from kvm_dist.data.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    RWKVWorldTokenizer,
    Tokenizer,
    build_tokenizer,
)
from kvm_dist.exit_codes import StorageError
from models.folder.config import OWN_TOKENIZER
from models.folder.tokenizer import write_byte_tokenizer, write_world_tokenizer

NO_TOKENIZER = "none"
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def own_tokenizer(folder: Path) -> Tokenizer | None:
    """The Hugging Face tokenizer whose files lie in `folder`, if any do."""
    return build_tokenizer(str(folder)) if any((folder / name).is_file() for name in _FILES) else None


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> str:
    """Write the files that `AutoTokenizer` loads; how `config.json` names the tokenizer.

    Raises StorageError where they cannot be written.
    """
    try:
        return _write(tokenizer, folder)
    except OSError:
        raise
    except Exception as error:  # the one kind of the tokenizers library
        raise StorageError(
            f"the files of tokenizer {tokenizer.name} cannot be written ({error}); make room or permissions, "
            "or give another path"
        ) from error


def _write(tokenizer: Tokenizer, folder: Path) -> str:
    if isinstance(tokenizer, ByteTokenizer):
        write_byte_tokenizer(folder)
        return tokenizer.name
    if isinstance(tokenizer, RWKVWorldTokenizer):
        write_world_tokenizer(folder, tokenizer.vocabulary_file)
        return tokenizer.name
    assert isinstance(tokenizer, HuggingFaceTokenizer), f"no files are known for a {type(tokenizer).__name__}"
    tokenizer.save(folder)
    return OWN_TOKENIZER
