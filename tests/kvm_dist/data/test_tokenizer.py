import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvm_dist.data.tokenizer import build_tokenizer, require_ids_below, token_dtype
from kvm_dist.exit_codes import ConfigError, DataError

TEXT = "def state(x):\n    return x ** 2  # étage 鍵 🙂\n"


@pytest.mark.parametrize("name", ["bytes", "rwkv-world"])
def test_text_survives_encoding_and_decoding(name: str) -> None:
    tokenizer = build_tokenizer(name)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert np.array_equal(tokenizer.encode(TEXT.encode()), ids)
    assert ids.max() < tokenizer.vocab_size
    assert ids.dtype == token_dtype(tokenizer.vocab_size)
    assert tokenizer.separator_id not in ids


@pytest.mark.parametrize("name", ["bytes", "rwkv-world"])
def test_decoding_a_cut_character_gives_a_replacement_and_does_not_abort(name: str) -> None:
    tokenizer = build_tokenizer(name)
    ids = tokenizer.encode("🙂")
    if name == "bytes":
        ids = ids[:-1]
    else:
        ids = np.array([0xF0 + 1])  # the single byte F0 alone
    assert "\ufffd" in tokenizer.decode(ids)


def test_ids_that_are_no_bytes_decode_to_the_replacement_character() -> None:
    assert build_tokenizer("bytes").decode([104, 105, 256, 300]) == "hi\ufffd\ufffd"


def test_rwkv_ids_are_those_of_the_published_vocabulary() -> None:
    assert build_tokenizer("rwkv-world").encode("hello é world").tolist()[0] == 34550


def test_bytes_that_are_not_utf8_are_tokenised_all_the_same() -> None:
    assert build_tokenizer("bytes").encode(b"\xff\xfe").tolist() == [255, 254]
    assert "\ufffd" in build_tokenizer("rwkv-world").decode(build_tokenizer("rwkv-world").encode(b"a\xff"))


def test_fingerprints_tell_tokenizers_apart() -> None:
    assert build_tokenizer("bytes").fingerprint != build_tokenizer("rwkv-world").fingerprint
    assert build_tokenizer("rwkv-world").fingerprint == build_tokenizer("rwkv-world").fingerprint


@pytest.mark.parametrize(("size", "dtype"), [(256, "|u1"), (257, "<u2"), (65536, "<u2"), (65537, "<u4")])
def test_the_token_dtype_is_the_narrowest(size: int, dtype: str) -> None:
    assert token_dtype(size).str == dtype


def test_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(DataError, match=r"x\.npy: token ids span 3 to 256, wanted 0 to 255"):
        require_ids_below(np.array([3, 256]), 256, "x.npy")


def test_an_unknown_tokenizer_is_refused_with_the_choices(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="or use bytes or rwkv-world"):
        build_tokenizer(str(tmp_path / "nothing"))


def test_a_tokenizer_without_an_end_of_text_token_is_refused_with_the_mend(tmp_path: Path) -> None:
    folder = _write_hugging_face_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ConfigError, match=r'name one as "eos_token" in its tokenizer_config\.json'):
        build_tokenizer(str(folder))


def test_a_hugging_face_folder_works_offline(tmp_path: Path) -> None:
    folder = _write_hugging_face_folder(tmp_path)
    tokenizer = build_tokenizer(str(folder))
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.separator_id == tokenizer.vocab_size - 1
    assert tokenizer.fingerprint == build_tokenizer(str(folder)).fingerprint
    assert tokenizer.separator_id not in tokenizer.encode(TEXT)


def _write_hugging_face_folder(folder: Path) -> Path:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend)
    wrapped.add_special_tokens({"eos_token": "<|end|>"})
    wrapped.save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


def test_preparing_and_checking_import_no_torch() -> None:
    code = (
        "import sys, kvm_dist.data.prepare, kvm_dist.data.check, kvm_dist.data.first_use\n"
        "sys.exit('torch' in sys.modules or 'webdataset' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
