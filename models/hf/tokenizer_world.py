"""The RWKV world tokenizer as a tokenizer of transformers, registered by `import models.hf`."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizer

from models.folder.tokenizer import WORLD_VOCABULARY
from models.hf.configuration import KVMDistConfig

_IDS = 65536  # of the models' embeddings; a few of them have no entry
_SEPARATOR = "<|endoftext|>"


class KVMDistWorldTokenizer(PreTrainedTokenizer):
    """At every byte the longest entry of the vocabulary is taken. Id 0 stands for no bytes and ends a text.

    A token is written as one letter a byte (Latin-1). Texts that spell the separator do not hold it; tokens
    that were added, which get ids from 65536 on, are looked for inside texts.
    """

    vocab_files_names = {"vocab_file": WORLD_VOCABULARY}  # noqa: RUF012
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(self, vocab_file: str | None = None, **options: Any) -> None:
        if vocab_file is None:  # what transformers gives where the file is missing
            raise ValueError(
                f"no {WORLD_VOCABULARY} in the folder, nor files of another tokenizer; copy it again, or "
                "make it again with one: kvm-dist import DIR OUT --tokenizer NAME"
            )
        self.vocab_file = Path(vocab_file)
        self._id_of = dict(_entries(self.vocab_file))
        self._entry_of = {number: entry for entry, number in self._id_of.items()}
        self._longest: dict[bytes, int] = {}  # by first two bytes
        for entry in self._id_of:
            self._longest[entry[:2]] = max(self._longest.get(entry[:2], 0), len(entry))
        without_bytes = {0: _SEPARATOR} | {
            number: f"<unused {number}>" for number in range(1, _IDS) if number not in self._entry_of
        }
        self._empty_of = {name: number for number, name in without_bytes.items()}
        self._token_of = without_bytes | {
            number: entry.decode("latin-1") for number, entry in self._entry_of.items()
        }
        options.setdefault("eos_token", _SEPARATOR)
        super().__init__(**options)

    @property
    def vocab_size(self) -> int:
        return _IDS

    def get_vocab(self) -> dict[str, int]:
        return {token: number for number, token in self._token_of.items()} | self._added_tokens_encoder

    def tokenize(self, text: str, **options: Any) -> list[str]:
        """The entries and added tokens that make up `text`."""
        added = [token for token in self._added_tokens_encoder if token != _SEPARATOR]
        if not added or options.get("split_special_tokens", self.split_special_tokens):
            return self._tokenize(text)
        longest_first = sorted(added, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
        return [
            token
            for place, part in enumerate(parts)
            for token in ([part] if place % 2 else self._tokenize(part))
        ]

    def _tokenize(self, text: str, **unused: Any) -> list[str]:
        return [entry.decode("latin-1") for entry in self._longest_entries(text.encode())]

    def _longest_entries(self, data: bytes) -> Iterator[bytes]:
        place = 0
        while place < len(data):
            longest = self._longest.get(data[place : place + 2], 1)
            for length in range(longest, 0, -1):
                entry = data[place : place + length]
                if entry in self._id_of:
                    break
            yield entry
            place += length

    def _convert_token_to_id(self, token: str) -> int | None:
        """None, as there is no token for what is unknown, if `token` is none of the vocabulary's."""
        if token in self._empty_of:
            return self._empty_of[token]
        if all(letter < "\u0100" for letter in token):
            return self._id_of.get(token.encode("latin-1"), self.unk_token_id)
        return self.unk_token_id

    def _convert_id_to_token(self, index: int) -> str:
        return self._token_of.get(index, _SEPARATOR)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return b"".join(map(self.bytes_of, tokens)).decode("utf-8", "replace")

    def bytes_of(self, token: str) -> bytes:
        """What `token` stands for; none for the separator and ids without an entry."""
        if token in self._empty_of:
            return b""
        added = self._added_tokens_encoder.get(token, 0) >= _IDS
        return token.encode() if added else token.encode("latin-1")

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        name = f"{filename_prefix}-{WORLD_VOCABULARY}" if filename_prefix else WORLD_VOCABULARY
        copy = Path(save_directory) / name
        copy.write_bytes(self.vocab_file.read_bytes())
        return (str(copy),)


def _entries(vocabulary: Path) -> Iterator[tuple[bytes, int]]:
    """Lines of `ID LITERAL LENGTH`. ValueError names one that is not."""
    for place, line in enumerate(vocabulary.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            number, rest = line.split(" ", 1)
            entry = ast.literal_eval(rest.rsplit(" ", 1)[0])
            found = (entry.encode() if isinstance(entry, str) else bytes(entry)), int(number)
        except (ValueError, SyntaxError, TypeError) as error:
            raise ValueError(
                f"{vocabulary}:{place}: wanted ID LITERAL LENGTH, got {line[:80]!r}; copy the file again"
            ) from error
        yield found


AutoTokenizer.register(KVMDistConfig, slow_tokenizer_class=KVMDistWorldTokenizer, exist_ok=True)
