"""The RWKV world tokenizer as a tokenizer of transformers, registered by `import models.hf`."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizer

from models.folder.tokenizer import WORLD_VOCABULARY
from models.hf.configuration import KVMDistConfig


class KVMDistWorldTokenizer(PreTrainedTokenizer):
    """At every byte the longest entry of the vocabulary is taken. Id 0 stands for no bytes and ends a text.

    A token is written as one letter a byte (Latin-1). Special tokens are not looked for inside texts.
    """

    vocab_files_names = {"vocab_file": WORLD_VOCABULARY}  # noqa: RUF012
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(self, vocab_file: str, **options: Any) -> None:
        self.vocab_file = Path(vocab_file)
        self._id_of = dict(_entries(self.vocab_file.read_text(encoding="utf-8")))
        self._entry_of = {number: entry for entry, number in self._id_of.items()}
        self._longest: dict[bytes, int] = {}  # by first two bytes
        for entry in self._id_of:
            self._longest[entry[:2]] = max(self._longest.get(entry[:2], 0), len(entry))
        options.setdefault("eos_token", "<|endoftext|>")
        self._separator = str(options["eos_token"])
        super().__init__(**options)

    @property
    def vocab_size(self) -> int:
        return 65536

    def get_vocab(self) -> dict[str, int]:
        return {entry.decode("latin-1"): number for entry, number in self._id_of.items()} | {
            self._separator: 0
        }

    def tokenize(self, text: str, **unused: Any) -> list[str]:
        """The entries that make up `text`, which may spell a special token without being one."""
        return self._tokenize(text)

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

    def _convert_token_to_id(self, token: str) -> int:
        return 0 if token == self._separator else self._id_of[token.encode("latin-1")]

    def _convert_id_to_token(self, index: int) -> str:
        entry = self._entry_of.get(index)
        return self._separator if entry is None else entry.decode("latin-1")

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        spelled = (token.encode("latin-1") for token in tokens if token != self._separator)
        return b"".join(spelled).decode("utf-8", "replace")

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        name = f"{filename_prefix}-{WORLD_VOCABULARY}" if filename_prefix else WORLD_VOCABULARY
        copy = Path(save_directory) / name
        copy.write_bytes(self.vocab_file.read_bytes())
        return (str(copy),)


def _entries(text: str) -> Iterator[tuple[bytes, int]]:
    """Lines of `ID LITERAL LENGTH`."""
    for line in text.splitlines():
        number, rest = line.split(" ", 1)
        entry = ast.literal_eval(rest.rsplit(" ", 1)[0])
        yield entry.encode() if isinstance(entry, str) else entry, int(number)


AutoTokenizer.register(KVMDistConfig, slow_tokenizer_class=KVMDistWorldTokenizer, exist_ok=True)
