"""Bytes of texts in rows that end inside characters."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from kvm_dist.config import RunConfig
from kvm_dist.data.index import load_index
from kvm_dist.data.prepare import prepare
from kvm_dist.data.shards import split_documents
from kvm_dist.data.tokenizer import Tokenizer, build_tokenizer
from kvm_dist.evaluate import perplexity
from kvm_dist.evaluate.documents import row_bytes
from kvm_dist.evaluate.tasks import Options
from models.folder.tokenizer import write_byte_tokenizer, write_world_tokenizer

TEXTS = [
    "吾輩は猫である。名前はまだ無い。 どこで生れたか頓と見当がつかぬ。" * 7,
    "𠮷野家で𩸽を食べる🙂🏽 — déjà vu\n" * 5,
    "한국어 문장과 中文句子、混在一起。" * 6 + "\ufffd\ufffd",
    "plain words, and two  spaces" * 9,
]


def write_pieces(folder: Path) -> None:
    """As sentencepiece makes them: spaces are letters, one before every text; bytes for other letters."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for piece in ("\u2581", "の", "で", "e", "d", "\u2581e", "文", "文\u2581"):
        vocabulary[piece] = len(vocabulary)
    merges = [("\u2581", "e"), ("文", "\u2581")]
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    parts = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    backend.decoder = decoders.Sequence(parts)
    _save(backend, folder)


def write_letters_of_bytes(folder: Path) -> None:
    """As in GPT-2: every letter of a token is a byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)} | {"ãģ": 256}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[("ã", "ģ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("混在", normalized=False)])
    _save(backend, folder)


def _save(backend: Backend, folder: Path) -> None:
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>").save_pretrained(folder)


def write_own_world(folder: Path) -> None:
    import models.hf  # registers the class of these files
    from kvm_dist.data.tokenizer import RWKVWorldTokenizer

    assert models.hf
    folder.mkdir()
    write_world_tokenizer(folder, RWKVWorldTokenizer().vocabulary_file)


def write_own_bytes(folder: Path) -> None:
    folder.mkdir()
    write_byte_tokenizer(folder)


Written = Callable[[Path], None] | str
KINDS: list[Written] = [
    "bytes",
    "rwkv-world",
    write_letters_of_bytes,
    write_pieces,
    write_own_world,
    write_own_bytes,
]


@pytest.fixture(
    scope="module", params=KINDS, ids=lambda kind: kind if isinstance(kind, str) else kind.__name__
)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if isinstance(request.param, str):
        return build_tokenizer(request.param)
    folder = tmp_path_factory.mktemp("tokenizer") / "files"
    request.param(folder)
    return build_tokenizer(str(folder))


@pytest.mark.parametrize("text", TEXTS, ids=["japanese", "rare", "korean", "plain"])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 64])
def test_parts_of_a_text_have_its_bytes_together(tokenizer: Tokenizer, text: str, length: int) -> None:
    ids = tokenizer.encode(text).astype(np.int64)
    separator = tokenizer.separator_id
    stream = np.concatenate([[separator], ids, [separator], ids, [separator]])
    rows = [(int(stream[start]), stream[start + 1 :][:length]) for start in range(0, stream.size - 1, length)]
    assert sum(row_bytes(tokenizer, before, row) for before, row in rows) == 2 * len(text.encode())


@pytest.mark.parametrize("context", [5, 17, 96])
def test_sequences_of_packed_documents_have_the_bytes_of_the_texts(
    context: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "texts"
    source.mkdir()
    for number in range(12):
        (source / f"{number}.txt").write_text(f"{number} {TEXTS[number % len(TEXTS)]}")
    prepare(str(source), tmp_path / "data", "rwkv-world", validation_fraction=0.6, progress=False)
    index = load_index(tmp_path / "data")
    world = build_tokenizer("rwkv-world")
    wanted = sum(len(world.decode(ids.tolist()).encode()) for ids in split_documents(index, "validation"))
    monkeypatch.setattr(perplexity, "held_out_data", lambda *_: index)
    monkeypatch.setattr(perplexity, "rows_at_once", lambda *_: 4)
    monkeypatch.setattr(perplexity, "next_token_losses", lambda model, inputs, labels: torch.zeros(1))
    opened = SimpleNamespace(tokenizer=world, model=None, config=RunConfig(name="any"))
    outcome = perplexity.evaluate(cast(Any, opened), Options(tokens=(context,)), lambda done, total: None)
    assert outcome.details["bytes"] == wanted > 1000
