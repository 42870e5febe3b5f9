"""Files of our tokenizers, as `AutoTokenizer` reads them."""

import json
import shutil
from pathlib import Path

SEPARATOR = "\x00"  # the text of id 0: a special token any other text of which would be found inside texts
WORLD_CLASS = "KVMDistWorldTokenizer"  # of models.hf.tokenizer_world
WORLD_VOCABULARY = "rwkv_vocabulary.txt"


def write_byte_tokenizer(folder: Path) -> None:
    """One id a byte, id 0 ends a text: plain files that `AutoTokenizer` loads without code of ours."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = _byte_letters()
    vocabulary = {SEPARATOR: 0} | {letter: byte for byte, letter in enumerate(letters) if byte}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(SEPARATOR, normalized=False, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_tokenizer_config(folder, "PreTrainedTokenizerFast", SEPARATOR)


def write_world_tokenizer(folder: Path, vocabulary: Path) -> None:
    """The RWKV world vocabulary, for the class that `import models.hf` registers."""
    shutil.copyfile(vocabulary, folder / WORLD_VOCABULARY)
    _write_tokenizer_config(folder, WORLD_CLASS, "<|endoftext|>")


def _write_tokenizer_config(folder: Path, tokenizer_class: str, separator: str) -> None:
    values = {
        "tokenizer_class": tokenizer_class,
        "bos_token": separator,
        "eos_token": separator,
        "pad_token": separator,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 30,
    }
    text = json.dumps(values, indent=2, ensure_ascii=True) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _byte_letters() -> list[str]:
    """The printable letter that stands for each byte in byte-level vocabularies."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
