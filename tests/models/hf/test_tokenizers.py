import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kvm_dist.data.tokenizer import ByteTokenizer, RWKVWorldTokenizer, Tokenizer
from models.folder.tokenizer import write_byte_tokenizer, write_world_tokenizer
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


def test_a_missing_tokenizer_is_named(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="nothing-here"):
        load_tokenizer(str(tmp_path / "nothing-here"))
