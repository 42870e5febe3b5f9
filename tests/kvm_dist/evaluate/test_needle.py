"""Needles: prompts of an exact length, and scores of models that are known to find or to miss them."""

import re
from random import Random
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kvm_dist.data.tokenizer import ByteTokenizer, RWKVWorldTokenizer, Tokenizer
from kvm_dist.evaluate import needle_task
from kvm_dist.evaluate.needle import NEEDLE_TASKS, REPEATED, Haystack, make_prompt
from kvm_dist.evaluate.needle_score import answers
from kvm_dist.evaluate.tasks import Options
from kvm_dist.exit_codes import ConfigError
from kvm_dist.plots.needle import _subtitle
from kvm_dist.pretrained import Pretrained
from tests.kvm_dist.evaluate.conftest import nobody_watches
from tests.kvm_dist.evaluate.tiny_checkpoint import TinyRun

TEXT = "".join(f"This is sentence {number} of a text.\n" for number in range(40))
NEEDLE = re.compile(r"The secret of the (\w+ \w+) is (\S+)\. ")


@pytest.fixture(params=["bytes", "rwkv-world"])
def tokenizer(request: pytest.FixtureRequest, world: RWKVWorldTokenizer) -> Tokenizer:
    return world if request.param == "rwkv-world" else ByteTokenizer()


@pytest.mark.parametrize("tokens", [301, 1000])
@pytest.mark.parametrize("name", ["S1", "S2", "S3"])
def test_a_prompt_has_its_length_and_one_needle_and_asks_for_it(
    tokenizer: Tokenizer, name: str, tokens: int
) -> None:
    task = NEEDLE_TASKS[name]
    haystack = Haystack(REPEATED if task.repeated else [TEXT], tokenizer)
    prompt = make_prompt(task, haystack, tokenizer, tokens, 0.5, Random(1))
    assert prompt.ids.shape == (tokens,)
    assert prompt.ids[0] == tokenizer.separator_id
    text = tokenizer.decode(prompt.ids[1:])
    assert NEEDLE.findall(text) == [(prompt.key, prompt.value)]
    assert text.endswith(f"the secret of the {prompt.key} is")
    assert re.fullmatch(
        r"\d{7}" if name != "S3" else r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", prompt.value
    )


def test_depth_moves_the_needle_from_the_first_to_the_last_sentence() -> None:
    tokenizer, task = ByteTokenizer(), NEEDLE_TASKS["S2"]
    haystack = Haystack([TEXT], tokenizer)
    prompts = [make_prompt(task, haystack, tokenizer, 1500, tenth / 10, Random(0)) for tenth in range(11)]
    places = [tokenizer.decode(prompt.ids).index("The secret") for prompt in prompts]
    assert places == sorted(places)
    assert len(set(places)) == 11
    assert (prompts[0].depth, prompts[-1].depth) == (0.0, 1.0)
    assert all(abs(prompt.depth - tenth / 10) < 0.03 for tenth, prompt in enumerate(prompts))
    first, last = (tokenizer.decode(prompts[end].ids) for end in (0, -1))
    assert places[0] == 1 + len(task.opening)
    assert last[places[-1] :].startswith(NEEDLE.search(first).group() + task.question[:10])  # type: ignore[union-attr]


def test_the_same_seed_gives_the_same_prompt_and_another_another() -> None:
    tokenizer, task = ByteTokenizer(), NEEDLE_TASKS["S3"]
    haystack = Haystack([TEXT], tokenizer)
    one, again, other = (
        make_prompt(task, haystack, tokenizer, 800, 0.3, Random(f"seed {n}")) for n in (1, 1, 2)
    )
    assert np.array_equal(one.ids, again.ids)
    assert one.value == again.value
    assert one.value != other.value


def test_text_is_cut_at_its_begin_and_goes_on_after_its_end() -> None:
    tokenizer = ByteTokenizer()
    haystack = Haystack(["One. Two. Three."], tokenizer)
    assert [tokenizer.decode(ids) for ids in haystack.segments] == ["One. ", "Two. ", "Three."]
    found = {tokenizer.decode(np.concatenate(haystack.cut(9, Random(seed)))) for seed in range(20)}
    assert found == {"ne. Two. ", ". Three.", "hree.One. "} or all(len(text) == 9 for text in found)
    assert any(
        "Three.One. " in tokenizer.decode(np.concatenate(haystack.cut(30, Random(s)))) for s in range(9)
    )
    assert haystack.cut(0, Random(0)) == []


def test_a_length_below_its_words_and_an_empty_text_are_refused() -> None:
    tokenizer = ByteTokenizer()
    with pytest.raises(ValueError, match=r"needle S2 at 100 tokens: its words alone take 1\d\d; give longer"):
        make_prompt(NEEDLE_TASKS["S2"], Haystack([TEXT], tokenizer), tokenizer, 100, 0.5, Random(0))
    with pytest.raises(ValueError, match="the haystack is empty"):
        Haystack([""], tokenizer)


class Finder(nn.Module):
    """Says what the needle says, if it stands within the last `sight` bytes; else nines."""

    def __init__(self, sight: int) -> None:
        super().__init__()
        self.sight = sight
        self.embedding = nn.Embedding(256, 1)
        self.config = type("Config", (), {"vocab_size": 256, "position_multiple": 1})

    def forward(self, input_ids: Tensor, cache: Any) -> Tensor:
        rows = cache.load("read") or [[] for _ in input_ids]
        rows = [row + ids.tolist() for row, ids in zip(rows, input_ids, strict=True)]
        cache.store("read", rows)
        logits = torch.zeros(*input_ids.shape, 256)
        for number, row in enumerate(rows):
            logits[number, -1, self._next(bytes(row).decode())] = 1
        return logits

    def _next(self, text: str) -> int:
        said = text.rpartition(" is")[2]
        found = NEEDLE.search(text[-self.sight :])
        value = found[2] if found else "9" * 60
        return ord(f" {value}{'.' * 60}"[len(said)])


def find(sight: int, **options: Any) -> needle_task.Outcome:
    settings = {"sequence_length": 512}
    opened = Pretrained(
        cast(Any, Finder(sight)),
        cast(Any, type("Config", (), {"data": type("Data", (), settings | {"path": options.pop("path")})})),
        ByteTokenizer(),
        torch.device("cpu"),
        1,
        options["haystack"],
    )
    return needle_task.evaluate(opened, Options(samples=2, **options), nobody_watches)


@pytest.fixture
def source(tiny_run: TinyRun) -> dict[str, Any]:
    return {"path": tiny_run.data, "haystack": tiny_run.data.parent / "texts"}


def test_a_model_that_sees_everything_finds_every_needle(source: dict[str, Any]) -> None:
    outcome = find(10_000, tokens=(400, 700), depths=(0.0, 1.0), **source)
    assert set(outcome.metrics) == {f"{name}/{at}" for name in ("S1", "S2", "S3") for at in (400, 700, "all")}
    assert set(outcome.metrics.values()) == {1.0}
    assert len(outcome.details["answers"]) == 3 * 2 * 2 * 2


def test_a_model_that_sees_the_end_finds_what_lies_there(source: dict[str, Any]) -> None:
    outcome = find(300, tokens=(900,), depths=(0.0, 0.4, 1.0), needles=("S2",), **source)
    found = {cell["depth"]: cell["found"] for cell in outcome.details["cells"]}
    assert found == {0.0: 0, 0.4: 0, 1.0: 2}
    assert outcome.metrics == {"S2/900": pytest.approx(1 / 3), "S2/all": pytest.approx(1 / 3)}
    assert outcome.rows == [("S2", "900", "33.3%", "0%", "0%", "100%")]
    assert all("9999" in told["answer"] for told in outcome.details["answers"] if told["depth"] < 0.5)


def test_lengths_by_default_are_training_contexts_that_hold_the_words(source: dict[str, Any]) -> None:
    outcome = find(10_000, depths=(0.5,), needles=("S1",), **source)
    assert outcome.settings["lengths"] == [512, 1024, 2048]


def test_prompts_do_not_depend_on_what_else_is_asked(source: dict[str, Any]) -> None:
    whole = find(10_000, tokens=(400, 500), depths=(0.0, 1.0), needles=("S1", "S2"), **source)
    part = find(10_000, tokens=(500,), depths=(1.0,), needles=("S2",), **source)
    told = [one for one in whole.details["answers"] if (one["needle"], one["tokens"]) == ("S2", 500)]
    assert part.details["answers"] == told[2:]
    assert len({one["value"] for one in whole.details["answers"]}) == 16
    other = find(10_000, tokens=(500,), depths=(1.0,), needles=("S2",), seed=1, **source)
    assert part.details["answers"] != other.details["answers"]


def test_unknown_needles_and_lengths_that_hold_none_are_errors(source: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--needle s3: unknown needle; did you mean S3"):
        find(1, needles=("s3",), **source)
    with pytest.raises(ConfigError, match="give longer --tokens"):
        find(1, tokens=(50,), needles=("S1",), **source)
    told = (
        r"--tokens 10, of which \d\d are for the answer: needle S1 at 0 tokens.*give longer --tokens, such as"
    )
    with pytest.raises(ConfigError, match=told):
        find(1, tokens=(10,), needles=("S1",), **source)


def test_an_answer_ends_with_its_value(source: dict[str, Any]) -> None:
    task, tokenizer = NEEDLE_TASKS["S1"], ByteTokenizer()
    prompt = make_prompt(task, Haystack(REPEATED, tokenizer), tokenizer, 400, 0.5, Random(0))
    assert answers(cast(Any, Finder(10_000)), tokenizer, [prompt], 50) == [f" {prompt.value}"]
    assert answers(cast(Any, Finder(1)), tokenizer, [prompt], 9) == [" 99999999"]


def test_the_picture_counts_one_sample_and_one_depth_as_one() -> None:
    settings = {"samples": 1, "depths": [0.5], "lengths": [512], "training_context": None}
    record = {"settings": settings}
    assert _subtitle([record]).startswith("share of 1 sample a field;")
    assert _subtitle([record, record]) == "1 sample at one depth"
    many = {"settings": settings | {"samples": 5, "depths": [0.0, 1.0]}}
    assert _subtitle([many, many]) == "5 samples at each of 2 depths"
