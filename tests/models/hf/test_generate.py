"""`generate` from a cache against `generate` that reads everything again for every token."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache

from models.cache import CachedSequence, read
from models.folder.tokenizer import write_byte_tokenizer
from models.hf import KVMDistCache, KVMDistForCausalLM
from models.hf.generation import CACHE_KEY
from parallel.sequence.context import WholeSequence
from tests.models.hf.faces import FAMILIES, face

PROMPT, NEW = 27, 9  # past edges of chunks (8, 16) and windows (8 to 32), with a budget that grows
PADDING = 0
BEAMS: dict[str, Any] = {"num_beams": 3}
SAMPLING: dict[str, Any] = {"do_sample": True, "top_k": 20}


def prompts(rows: int, tokens: int = PROMPT) -> Tensor:
    return torch.randint(1, 37, (rows, tokens), generator=torch.Generator().manual_seed(tokens))


def generate(model: KVMDistForCausalLM, ids: Tensor, **settings: Any) -> Any:
    torch.manual_seed(0)
    return model.generate(ids, **{"max_new_tokens": NEW, "pad_token_id": PADDING} | settings)


@pytest.mark.parametrize(
    ("family", "way"),
    [(family, {}) for family in FAMILIES]
    + [(family, BEAMS) for family in ("kvm_sqrt", "all kinds", "recurrences")]
    + [("kvm_sqrt", SAMPLING), ("kvm/rwkv7", BEAMS | SAMPLING)],
    ids=str,
)
def test_a_cache_changes_no_token(family: str, way: dict[str, Any]) -> None:
    model = face(family)
    settings = {"output_logits": True, "return_dict_in_generate": True} | way
    cached, uncached = (
        generate(model, prompts(2), use_cache=use_cache, **settings) for use_cache in (True, False)
    )

    assert torch.equal(cached.sequences, uncached.sequences)
    assert cached.sequences.shape == (2, PROMPT + NEW)
    for ours, expected in zip(cached.logits, uncached.logits, strict=True):
        assert (ours - expected).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("family", "way"), [("kvm_sqrt", BEAMS), ("all kinds", {}), ("recurrences", {})], ids=str
)
def test_a_padded_batch_writes_what_its_rows_write_alone(family: str, way: dict[str, Any]) -> None:
    model = face(family)
    rows = [prompts(3)[1:2], prompts(1, 12), prompts(3)[2:]]  # two lengths
    settings = {"output_logits": True, "return_dict_in_generate": True} | way
    alone = [generate(model, prompt, **settings) for prompt in rows]
    texts = torch.stack([found.sequences[0, -NEW:] for found in alone])
    assert len(texts.unique()) > 5, "texts that do not depend on their prompts show nothing"
    for side in ("left", "right"):
        ids, mask = torch.full((3, 30), PADDING), torch.zeros(3, 30, dtype=torch.int64)
        for row, prompt in enumerate(rows):
            tokens = prompt.shape[1]
            place = slice(30 - tokens, 30) if side == "left" else slice(0, tokens)
            ids[row, place], mask[row, place] = prompt[0], 1
        together = generate(model, ids, attention_mask=mask, **settings)

        assert torch.equal(together.sequences[:, 30:], texts), side
        for step, logits in enumerate(together.logits):
            expected = torch.cat([found.logits[step] for found in alone])
            assert (logits - expected).abs().max() <= 1e-5, side


@pytest.mark.parametrize("way", [{}, BEAMS, SAMPLING], ids=str)
def test_a_text_ends_with_the_words_that_stop_it(tmp_path: Path, way: dict[str, Any]) -> None:
    write_byte_tokenizer(tmp_path)
    tokenizer, model = AutoTokenizer.from_pretrained(tmp_path), face("kvm/rwkv7")
    expected = generate(model, prompts(1), **way)[0, PROMPT:]
    stop = tokenizer.decode(expected[2:4])
    found = generate(model, prompts(1), stop_strings=[stop], tokenizer=tokenizer, **way)[0, PROMPT:]
    if way is not BEAMS:  # whose beams end at different places
        assert torch.equal(found, expected[:4])
    assert stop in tokenizer.decode(found)
    assert len(found) < NEW


def test_a_prompt_in_pieces_is_read_as_a_whole_one() -> None:
    model = face("all kinds")
    ids = prompts(2, 41)
    whole = generate(model, ids, max_new_tokens=5)

    for piece in (7, 40):
        assert torch.equal(generate(model, ids, max_new_tokens=5, prefill_chunk_size=piece), whole)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_prompt_in_pieces_is_read_as_a_whole_one(side: str) -> None:
    model = face("kvm_sqrt")
    ids, mask = prompts(3, 41), torch.ones(3, 41, dtype=torch.int64)
    for row, tokens in enumerate((41, 12, 25)):
        mask[row, : 41 - tokens] = 0
    if side == "right":
        mask = mask.flip(1)
    settings = {"attention_mask": mask, "max_new_tokens": 5}
    whole = generate(model, ids, **settings)

    for piece in (16, 40):  # some pieces hold no token of a row
        assert torch.equal(generate(model, ids, prefill_chunk_size=piece, **settings), whole)


def test_generation_goes_on_from_the_cache_of_an_earlier_one() -> None:
    model = face("kvm_sqrt")
    ids = prompts(2)
    first = generate(model, ids, return_dict_in_generate=True)
    cache = first[CACHE_KEY]
    expected = generate(model, ids, max_new_tokens=2 * NEW)

    assert cache.get_seq_length() == PROMPT + NEW - 1
    assert torch.equal(generate(model, first.sequences, **{CACHE_KEY: cache}), expected)
    assert cache.get_seq_length() == PROMPT + 2 * NEW - 1  # the text so far was not read again


def test_generation_follows_the_backbone_itself() -> None:
    model = face("kvm_swa")
    ids = prompts(1)
    found = generate(model, ids)
    for _ in range(NEW):
        with torch.no_grad():
            ids = torch.cat([ids, model.backbone(ids, WholeSequence())[:, -1:].argmax(-1)], dim=1)

    assert torch.equal(found, ids)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"penalty_alpha": 0.6, "top_k": 4}, "takes tokens back"),
        ({"prompt_lookup_num_tokens": 3}, "takes tokens back"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({CACHE_KEY: DynamicCache()}, "DynamicCache, wanted KVMDistCache"),
    ],
    ids=str,
)
def test_what_a_state_cannot_do_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(face("rwkv7"), prompts(1), **settings)


def test_an_assistant_is_refused() -> None:
    with pytest.raises(ValueError, match="takes tokens back"):
        generate(face("rwkv7"), prompts(1), assistant_model=face("rwkv7"))


def held_bytes(family: str, tokens: int) -> int:
    model = face(family)
    cache = KVMDistCache()
    ids = prompts(2, tokens)
    with torch.no_grad():
        for piece in (*ids[:, :9].split(1, dim=1), ids[:, 9:]):
            model(piece, past_key_values=cache)
    return cache.nbytes


@pytest.mark.parametrize("family", ["rwkv7", "bswa"])
def test_a_constant_state_takes_constant_memory(family: str) -> None:
    assert held_bytes(family, 40) == held_bytes(family, 80) > 0


def test_a_growing_state_grows_as_its_budget_does() -> None:
    short, long = held_bytes("kvm_sqrt", 64), held_bytes("kvm_sqrt", 256)

    assert 1.2 * short < long < 2.2 * short  # slots double, the window stays
    assert held_bytes("gptalpha", 256) > 3.8 * held_bytes("gptalpha", 64)


@pytest.mark.parametrize("family", ["kvm_sqrt", "all kinds"])
def test_rows_of_a_cache_can_be_reordered_repeated_and_left_out(family: str) -> None:
    model = face(family)
    ids, nexts = prompts(4, 37), prompts(4, 21)
    mask = torch.ones(4, 37, dtype=torch.int64)
    mask[1, :20] = mask[3, :20] = 0

    def after(change: Any, sources: list[int]) -> None:
        cache = KVMDistCache()
        with torch.no_grad():
            for piece in ids.split(36, dim=1):  # and a single token, which keeps more to read the next ones
                model(piece, attention_mask=mask[:, : cache.get_seq_length() + piece.shape[1]], cache=cache)
            change(cache)
            pieces = [model(piece, cache=cache).logits for piece in nexts[sources].split([1, 20], dim=1)]
            found = torch.cat(pieces, dim=1)
            for row, source in enumerate(sources):
                text = torch.cat([ids[source][mask[source] == 1], nexts[source]]).unsqueeze(0)
                expected = model.backbone(text, WholeSequence())[:, -21:]
                assert (found[row] - expected).abs().max() <= 1e-5

    after(lambda cache: cache.reorder_cache(torch.tensor([2, 2, 3, 0])), [2, 2, 3, 0])
    after(lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2, 3, 3])
    after(lambda cache: cache.batch_select_indices(torch.tensor([3, 1])), [3, 1])


def test_a_cache_of_other_rows_is_refused() -> None:
    model, cache = face("rwkv7"), KVMDistCache()
    model(prompts(2), past_key_values=cache)
    with pytest.raises(ValueError, match="the cache holds 2 rows, got 3"):
        model(prompts(3), past_key_values=cache)
    with pytest.raises(ValueError, match="cannot be cropped"):
        cache.crop(-1)


def test_selected_rows_share_nothing_with_those_they_come_from() -> None:
    model = face("kvm/rwkv7").backbone
    ids = prompts(2, 40)
    cache = CachedSequence()
    with torch.no_grad():
        read(model, ids, cache)
        chosen = cache.select(torch.tensor([1, 0]))
        before = read(model, ids.flip(0)[:, :1], chosen)
        other = cache.select(torch.tensor([1, 0]))
        read(model, ids, cache)
        again = read(model, ids.flip(0)[:, :1], other)
    assert chosen.start == other.start == 41
    assert torch.equal(before, again)
