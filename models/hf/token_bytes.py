"""How many bytes of a text each token of a Hugging Face tokenizer stands for."""

import json
import re
from collections.abc import Sequence
from typing import Any

from models.hf.tokenizer_world import KVMDistWorldTokenizer

_ONE_BYTE = re.compile("<0x[0-9A-F]{2}>")  # of vocabularies with bytes for letters they lack
_SPACE = "\u2581"  # how those write it


class TokenBytes:
    """Sizes of tokens in UTF-8, each by itself: one with a part of a character has the bytes of that part."""

    def __init__(self, tokenizer: Any) -> None:
        self._added = {number: one.content for number, one in tokenizer.added_tokens_decoder.items()}
        self._world = tokenizer if isinstance(tokenizer, KVMDistWorldTokenizer) else None
        self._letters_are_bytes = _decodes_byte_letters(tokenizer)
        tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        self.sizes: list[int] = [self._size(number, token) for number, token in enumerate(tokens)]
        # Some tokenizers put a space before every text.
        self.begin = sum(self.sizes[i] for i in tokenizer.encode("x", add_special_tokens=False)) - 1

    def of(self, ids: Sequence[int], begins: bool) -> int:
        """Bytes of ids in UTF-8; begins: whether the first begins a text."""
        return sum(self.sizes[i] for i in ids) - (self.begin if begins and len(ids) else 0)

    def _size(self, number: int, token: str | None) -> int:
        """None is an id that stands for nothing."""
        if token is None:
            return 0
        if self._world is not None:
            return len(self._world.bytes_of(token))
        if number in self._added:
            return len(self._added[number].encode())
        if self._letters_are_bytes:
            return len(token)
        return 1 if _ONE_BYTE.fullmatch(token) else len(token.replace(_SPACE, " ").encode())


def _decodes_byte_letters(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = None if backend is None else json.loads(backend.to_str())["decoder"]
    parts = [] if decoder is None else decoder.get("decoders", [decoder])
    return any(part["type"] == "ByteLevel" for part in parts)
