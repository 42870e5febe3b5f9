"""Needles in haystacks: prompts that hide a value in a long text and ask for it. Imports no torch.

After the single-needle tasks S1 to S3 of RULER (arXiv 2404.06654), in words of our own: scores compare with
each other, not to the digit with those of other generators.
"""

import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from kvm_dist.data.tokenizer import Tokenizer

REPEATED = (
    "A bird sits in the tree. ",
    "The wind is soft today. ",
    "One more day goes by. ",
    "All is well here. ",
)
_SEGMENT = re.compile(r".{1,400}?(?:[.!?]\s+|\n+)|.{1,400}", re.DOTALL)
_COLOURS = (
    "amber",
    "azure",
    "coral",
    "crimson",
    "golden",
    "indigo",
    "ivory",
    "lilac",
    "olive",
    "silver",
    "teal",
)
_THINGS = ("anchor", "basket", "candle", "door", "feather", "garden", "harbor", "island", "kettle", "lantern")
_ROOM_TO_ANSWER = 16  # tokens beside those of the value


def number(random: Random) -> str:
    """Seven digits."""
    return str(random.randrange(1_000_000, 10_000_000))


def identifier(random: Random) -> str:
    """A UUID."""
    return str(uuid.UUID(int=random.getrandbits(128), version=4))


def two_words(random: Random) -> str:
    return f"{random.choice(_COLOURS)} {random.choice(_THINGS)}"


@dataclass(frozen=True)
class NeedleTask:
    """What is hidden and how it is asked for; `{key}` and `{value}` stand in the texts.

    repeated: hidden in sentences that repeat, instead of in a text. The answer goes on where `question` ends.
    """

    name: str
    repeated: bool
    value: Callable[[Random], str] = number
    key: Callable[[Random], str] = two_words
    opening: str = "A secret is hidden in this text. Keep it in mind.\n\n"
    needle: str = "The secret of the {key} is {value}. "
    question: str = "\n\nQuestion: what is the secret of the {key}?\nAnswer: the secret of the {key} is"

    def shortest(self, tokenizer: Tokenizer) -> int:
        """Tokens of prompt and answer that hold the words of the task, and about as much text around them."""
        key, value = self.key(Random(0)), self.value(Random(0))
        words = (text.format(key=key, value=value) for text in (self.opening, self.needle, self.question))
        return 2 * sum(tokenizer.encode(text).size for text in words) + self.answer_tokens(tokenizer)

    def answer_tokens(self, tokenizer: Tokenizer) -> int:
        """Room for an answer: the value, as long as it gets, and a few words before it."""
        longest = max(tokenizer.encode(" " + self.value(Random(number))).size for number in range(32))
        return longest + _ROOM_TO_ANSWER


NEEDLE_TASKS = {
    task.name: task
    for task in (
        NeedleTask("S1", repeated=True),
        NeedleTask("S2", repeated=False),
        NeedleTask("S3", repeated=False, value=identifier),
    )
}


@dataclass(frozen=True)
class Prompt:
    """ids [tokens], int64; depth: where the needle came to lie, 0 before the text and 1 behind it."""

    ids: np.ndarray
    key: str
    value: str
    depth: float


class Haystack:
    """A text as sentences, each tokenised by itself, in which needles can be hidden between two of them."""

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer) -> None:
        """Raises ValueError for a text without a character."""
        segments = [segment for text in texts for segment in _SEGMENT.findall(text)]
        self.segments = [ids for ids in map(tokenizer.encode, segments) if ids.size]
        if not self.segments:
            raise ValueError("the haystack is empty; give a text with at least one sentence")

    def cut(self, tokens: int, random: Random) -> list[np.ndarray]:
        """Consecutive sentences from a random one on, over the end to the begin, `tokens` tokens together.

        Of the first sentences the begin is missing, as far as they do not fit.
        """
        place = random.randrange(len(self.segments))
        taken: list[np.ndarray] = []
        size = 0
        while size < tokens:
            taken.append(self.segments[place])
            size += taken[-1].size
            place = (place + 1) % len(self.segments)
        while size > tokens:
            excess = size - tokens
            size -= min(excess, taken[0].size)
            taken[0] = taken[0][excess:]
            taken = taken if taken[0].size else taken[1:]
        return taken


def make_prompt(
    task: NeedleTask, haystack: Haystack, tokenizer: Tokenizer, tokens: int, depth: float, random: Random
) -> Prompt:
    """A prompt of exactly `tokens` tokens, which begins with a separator; all of it follows from `random`.

    The needle lies between two sentences, as near to `depth` (0 to 1) of the text as these allow. Raises
    ValueError if the length does not even hold needle and question.
    """
    key, value = task.key(random), task.value(random)
    opening, needle, question = (
        tokenizer.encode(text.format(key=key, value=value))
        for text in (task.opening, task.needle, task.question)
    )
    room = tokens - 1 - opening.size - needle.size - question.size
    if room < 0:
        raise ValueError(
            f"needle {task.name} at {max(tokens, 0):,} tokens: its words alone take "
            f"{tokens - room:,}; give longer --tokens"
        )
    sentences = haystack.cut(room, random)
    ends = np.cumsum([0, *(sentence.size for sentence in sentences)])
    before = int(np.abs(ends - depth * room).argmin())
    parts = [opening, *sentences[:before], needle, *sentences[before:], question]
    ids = np.concatenate([np.array([tokenizer.separator_id]), *parts]).astype(np.int64)
    return Prompt(ids, key, value, float(ends[before] / room) if room else depth)
