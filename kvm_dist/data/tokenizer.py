"""Text to token ids and back: bytes, the RWKV world vocabulary, or a Hugging Face tokenizer. No torch."""

import ast
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvm_dist.exit_codes import ConfigError, DataError

if TYPE_CHECKING:
    from models.hf.token_bytes import TokenBytes


class Tokenizer(Protocol):
    """What preparation, training and sampling need of a tokenizer.

    `fingerprint` changes whenever the same text could give other ids; `separator_id` ends every document.
    """

    name: str
    vocab_size: int
    separator_id: int
    fingerprint: str

    def encode(self, text: bytes | str) -> np.ndarray:
        """Ids of `text`, [tokens] in `token_dtype(vocab_size)`. Bytes that are not UTF-8 may be replaced."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; incomplete UTF-8 becomes U+FFFD."""
        ...

    def text_bytes(self, ids: np.ndarray, begins: bool) -> int:
        """Bytes in UTF-8 of ids [tokens] of one text; begins: whether the first of them begins it.

        A part of a character counts its bytes: the parts of a text, however it is cut, have those of the
        text together.
        """
        ...


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest little-endian dtype that holds every id of the vocabulary."""
    if vocab_size <= 1 << 8:
        return np.dtype("|u1")
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class ByteTokenizer:
    """One id a byte. The separator is byte 0, which text does not contain."""

    name = "bytes"
    vocab_size = 256
    separator_id = 0
    fingerprint = hashlib.sha256(b"bytes, 256 ids, separator 0").hexdigest()

    def encode(self, text: bytes | str) -> np.ndarray:
        return np.frombuffer(text.encode() if isinstance(text, str) else text, dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        # A model may have more ids than bytes: 255 is in no UTF-8 text.
        return bytes(min(int(i), 255) for i in ids).decode("utf-8", "replace")

    def text_bytes(self, ids: np.ndarray, begins: bool) -> int:
        return int(ids.size)


class RWKVWorldTokenizer:
    """The RWKV world vocabulary, shipped inside `pyrwkv-tokenizer`; id 0 is free and separates documents."""

    name = "rwkv-world"
    vocab_size = 65536
    separator_id = 0

    def __init__(self) -> None:
        import pyrwkv_tokenizer

        self._encoder = pyrwkv_tokenizer.RWKVTokenizer()
        self.vocabulary_file = Path(self._encoder.vocab_filepath)
        self._bytes_of_id: dict[int, bytes] = {}
        self.fingerprint = hashlib.sha256(self.vocabulary_file.read_bytes()).hexdigest()

    def encode(self, text: bytes | str) -> np.ndarray:
        words = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return np.asarray(self._encoder.encode(words), dtype=token_dtype(self.vocab_size))

    def decode(self, ids: Iterable[int]) -> str:
        # The package's own decode aborts on ids that end inside a UTF-8 character.
        table = self._bytes_of_id or self._read_vocabulary()
        return b"".join(table.get(int(i), b"") for i in ids).decode("utf-8", "replace")

    def text_bytes(self, ids: np.ndarray, begins: bool) -> int:
        table = self._bytes_of_id or self._read_vocabulary()
        return sum(len(table.get(i, b"")) for i in ids.tolist())

    def _read_vocabulary(self) -> dict[int, bytes]:
        for line in self.vocabulary_file.read_text(encoding="utf-8").splitlines():
            number, rest = line.split(" ", 1)
            word = ast.literal_eval(rest.rsplit(" ", 1)[0])
            self._bytes_of_id[int(number)] = word.encode() if isinstance(word, str) else word
        return self._bytes_of_id


class HuggingFaceTokenizer:
    """A Hugging Face tokenizer folder or name; documents end with its end-of-text token."""

    def __init__(self, name: str) -> None:
        from models.hf.tokenizer import load_tokenizer

        try:
            self._tokenizer: Any = load_tokenizer(name)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{error}, or use bytes or rwkv-world") from error
        if self._tokenizer.eos_token_id is None:
            raise ConfigError(
                f"tokenizer {name!r} has no end-of-text token, which has to separate documents; name one as "
                '"eos_token" in its tokenizer_config.json'
            )
        self.name = name
        self._bytes: TokenBytes | None = None
        self.vocab_size = len(self._tokenizer)
        self.separator_id = int(self._tokenizer.eos_token_id)
        self.fingerprint = hashlib.sha256(self._definition().encode()).hexdigest()

    def _definition(self) -> str:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        vocabulary = repr(sorted(self._tokenizer.get_vocab().items()))
        return f"{self.separator_id} {vocabulary} {backend.to_str() if backend is not None else ''}"

    def encode(self, text: bytes | str) -> np.ndarray:
        words = text if isinstance(text, str) else text.decode("utf-8", "replace")
        ids = self._tokenizer.encode(words, add_special_tokens=False)
        return np.asarray(ids, dtype=token_dtype(self.vocab_size))

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self._tokenizer.decode([int(i) for i in ids])
        return text

    def text_bytes(self, ids: np.ndarray, begins: bool) -> int:
        from models.hf.token_bytes import TokenBytes

        if self._bytes is None:
            self._bytes = TokenBytes(self._tokenizer)
        return self._bytes.of(ids.tolist(), begins)

    def save(self, folder: Path) -> None:
        """Write the files from which this tokenizer loads again."""
        self._tokenizer.save_pretrained(folder)


def build_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called `name`: `bytes`, `rwkv-world`, or a Hugging Face folder or name."""
    if name == "bytes":
        return ByteTokenizer()
    if name == "rwkv-world":
        return RWKVWorldTokenizer()
    return HuggingFaceTokenizer(name)


def require_ids_below(tokens: np.ndarray, vocab_size: int, origin: str) -> None:
    """Refuse ids that the vocabulary does not have."""
    if tokens.size and (int(tokens.max()) >= vocab_size or int(tokens.min()) < 0):
        raise DataError(
            f"{origin}: token ids span {int(tokens.min())} to {int(tokens.max())}, "
            f"wanted 0 to {vocab_size - 1}; prepare it with the tokenizer that made these ids"
        )
