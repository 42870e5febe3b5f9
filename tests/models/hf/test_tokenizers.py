import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kvm_dist.data.tokenizer import ByteTokenizer, RWKVWorldTokenizer, Tokenizer
from models.folder.tokenizer import WORLD_VOCABULARY, write_byte_tokenizer, write_world_tokenizer
from models.hf.tokenizer import load_tokenizer
from models.hf.tokenizer_world import KVMDistWorldTokenizer

TEXTS = [
    "",
    "a",
    "Ā",
    "\x00a\x00",
    "héllo 日本 🎉\n\n  x\t",
    "<|endoftext|>",
    "  a  ",
    "a\r\nb",
    "\u200b\u2028",
]
any_text = st.text(st.characters(exclude_categories=["Cs"]))
OURS: dict[str, Tokenizer] = {"bytes": ByteTokenizer(), "rwkv-world": RWKVWorldTokenizer()}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tokenizers")
    for name in OURS:
        (folder / name).mkdir()
    write_byte_tokenizer(folder / "bytes")
    write_world_tokenizer(folder / "rwkv-world", RWKVWorldTokenizer().vocabulary_file)
    loaded = {name: AutoTokenizer.from_pretrained(folder / name) for name in OURS}
    return loaded | {"folder": folder}


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("text", TEXTS)
def test_exported_tokenizers_give_our_ids_and_our_text(name: str, text: str, theirs: dict[str, Any]) -> None:
    ids = OURS[name].encode(text).tolist()
    assert theirs[name](text).input_ids == ids, "nothing is put before or after a text"
    assert theirs[name].decode(ids) == text


@given(text=any_text)
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("name", OURS)
def test_any_text_has_the_same_ids(name: str, text: str, theirs: dict[str, Any]) -> None:
    assert theirs[name].encode(text, add_special_tokens=False) == OURS[name].encode(text).tolist()


@given(ids=st.lists(st.integers(1, 255)))
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("name", OURS)
def test_ids_that_end_inside_a_character_give_the_same_text(
    name: str, ids: list[int], theirs: dict[str, Any]
) -> None:
    assert theirs[name].decode(ids) == OURS[name].decode(ids)


@pytest.mark.parametrize("name", OURS)
def test_id_0_ends_a_text_and_pads(name: str, theirs: dict[str, Any]) -> None:
    tokenizer = theirs[name]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (0, 0, 0)
    ids = OURS[name].encode("ab").tolist()
    assert tokenizer.decode([*ids, 0], skip_special_tokens=True) == "ab"
    batch = tokenizer(["ab", "ab ab"], padding=True)
    pads = len(batch.input_ids[1]) - len(ids)
    assert batch.input_ids[0] == ids + [0] * pads
    assert batch.attention_mask[0] == [1] * len(ids) + [0] * pads


@pytest.mark.parametrize("name", OURS)
def test_a_tokenizer_that_was_saved_again_is_the_same(
    name: str, theirs: dict[str, Any], tmp_path: Path
) -> None:
    theirs[name].save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = "".join(TEXTS)
    assert again.encode(text) == OURS[name].encode(text).tolist()
    assert again.eos_token_id == 0


def test_the_byte_tokenizer_loads_without_code_of_ours(theirs: dict[str, Any], tmp_path: Path) -> None:
    folder = theirs["folder"] / "bytes"
    code = (
        "import sys; from transformers import AutoTokenizer; "
        f"print(AutoTokenizer.from_pretrained({str(folder)!r}).encode('aĀ')); "
        "assert 'models' not in sys.modules"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert ended.stdout == "[97, 196, 128]\n", ended.stderr


def test_the_world_tokenizer_is_the_class_that_the_package_registers(theirs: dict[str, Any]) -> None:
    assert type(theirs["rwkv-world"]) is KVMDistWorldTokenizer


def world(folder: Path) -> Any:
    """A world tokenizer of its own, to which tokens may be added."""
    write_world_tokenizer(folder, RWKVWorldTokenizer().vocabulary_file)
    return AutoTokenizer.from_pretrained(folder)


def test_added_tokens_get_ids_of_their_own_and_are_found_inside_texts(tmp_path: Path) -> None:
    tokenizer = world(tmp_path)
    assert tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>"]}) == 1
    assert tokenizer.add_tokens(["zz☃é"]) == 1
    saved = tmp_path / "saved"
    tokenizer.save_pretrained(saved)
    for one in (tokenizer, AutoTokenizer.from_pretrained(saved)):
        ids = one("é<|user|>ä zz☃é").input_ids
        assert ids == [*one("é").input_ids, 65536, *one("ä ").input_ids, 65537]
        assert one.decode(ids) == "é<|user|>ä zz☃é"
        assert one.decode(ids, skip_special_tokens=True) == "éä zz☃é"
        assert 65536 not in one("<|user|>", split_special_tokens=True).input_ids
        assert len(one) == 65538


def test_the_world_tokenizer_is_as_long_as_the_vocabulary_of_its_models(tmp_path: Path) -> None:
    tokenizer = world(tmp_path)
    assert len(tokenizer) == tokenizer.vocab_size == 65536, "resizing a model to it changes nothing"
    tokens = tokenizer.convert_ids_to_tokens(list(range(65536)))
    assert tokenizer.convert_tokens_to_ids(tokens) == list(range(65536))
    assert tokenizer.decode([0, 65530, 65535]) == ""


def test_a_token_that_the_world_vocabulary_lacks_has_no_id(tmp_path: Path) -> None:
    assert world(tmp_path).convert_tokens_to_ids(["☃", "no entry é", "a"]) == [None, None, 98]


def test_another_end_of_text_stays_what_it_is_when_saved(tmp_path: Path) -> None:
    tokenizer = world(tmp_path)
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert (again.eos_token_id, again("a<|end|>").input_ids) == (65536, [98, 65536])
    assert again.convert_tokens_to_ids("<|endoftext|>") == 0


def test_a_vocabulary_that_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    world(tmp_path)
    vocabulary = tmp_path / WORLD_VOCABULARY
    vocabulary.write_text(vocabulary.read_text().replace("\n5 ", "\nfive ", 1))
    with pytest.raises(ValueError, match=rf"{WORLD_VOCABULARY}:5: wanted ID LITERAL LENGTH, got .five"):
        load_tokenizer(str(tmp_path))
    vocabulary.unlink()
    with pytest.raises(ValueError, match=rf"no {WORLD_VOCABULARY} in the folder, .*--tokenizer NAME"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", '{"model": {"type": "nonsense"}}'])
def test_a_damaged_tokenizer_file_is_a_value_error_that_names_its_folder(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=rf"tokenizer '{tmp_path}' could not be loaded: .*give a folder"):
        load_tokenizer(str(tmp_path))


def test_a_missing_tokenizer_is_named(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="nothing-here"):
        load_tokenizer(str(tmp_path / "nothing-here"))
