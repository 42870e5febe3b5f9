"""The authors' published layout into a Hugging Face folder of ours."""

from pathlib import Path

import torch

from kvm_dist.convert.content import ModelContent, require_room, separator_tokens
from kvm_dist.convert.hugging_face import write_folder
from kvm_dist.convert.new_folder import require_free
from kvm_dist.convert.published import open_published
from kvm_dist.convert.tokenizer_files import NO_TOKENIZER, own_tokenizer
from kvm_dist.convert.weights import one_dtype
from kvm_dist.data.tokenizer import Tokenizer, build_tokenizer
from models.folder.card import CardFacts
from models.folder.config import SpecialTokens


def import_published(
    source: Path, out: Path, dtype: str | None, tokenizer: str | None, shard_bytes: int, silent: bool = False
) -> ModelContent:
    """Write the checkpoint in `source` to the new folder `out`; what was written comes back.

    dtype: float32 or bfloat16; None: as stored.  tokenizer: what `build_tokenizer` is given, or "none"; None:
    the one whose files lie in `source`, if any.
    Raises ConfigError, DataError or StorageError as `open_published` does; nothing is left at `out` then.
    """
    require_free(out)
    published = open_published(source)
    wanted = getattr(torch, dtype) if dtype else one_dtype(published.weights)
    found = own_tokenizer(source) if tokenizer is None else _named(tokenizer)
    if found:
        require_room(published.model, found)
    special = separator_tokens(found) if found else SpecialTokens.of(published.settings)
    facts = CardFacts(out.resolve().name, "a checkpoint in the layout that the authors of the paper publish")
    content = ModelContent(
        source, published.model, wanted, published.tensor, found, special, facts, published.notes
    )
    write_folder(out, content, shard_bytes, silent)
    return content


def _named(tokenizer: str) -> Tokenizer | None:
    return None if tokenizer == NO_TOKENIZER else build_tokenizer(tokenizer)
