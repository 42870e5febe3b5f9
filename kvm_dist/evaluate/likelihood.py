"""What harnesses ask of a language model, in texts: log-likelihoods and continuations.

Sequences of one length are read together, without pads, which would enter recurrent states. Every text
begins behind a separator, as documents do in training.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvm_dist.data.tokenizer import Tokenizer
from kvm_dist.evaluate.reading import losses_and_hits, next_token_losses, rows_at_once, write_on
from kvm_dist.evaluate.tasks import Watch
from models.backbone import Backbone
from models.loss import IGNORED_LABEL

LONGEST_ANSWER = 256  # tokens, where a request names no bound


@dataclass(frozen=True)
class Writing:
    """How a text is to be gone on with: until one of `stops`, for at most `tokens`; temperature 0: greedy."""

    prompt: str
    stops: tuple[str, ...] = ()
    tokens: int = LONGEST_ANSWER
    temperature: float = 0.0


class TextModel:
    """A backbone and its tokenizer. `longest`: only so many of the last tokens are read; None: all."""

    def __init__(
        self,
        model: Backbone,
        tokenizer: Tokenizer,
        watch: Watch,
        longest: int | None = None,
        seed: int = 0,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.longest = longest
        self._watch = watch
        self._seed = seed

    def log_likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Of each continuation behind its context, in nats, and whether it is what greedy writing gives."""
        sequences = [self._pair(*pair) for pair in pairs]
        found: dict[int, tuple[float, bool]] = {}
        for rows in self._batches([len(ids) for ids, _ in sequences]):
            inputs, labels = self._tensors([sequences[row] for row in rows])
            losses, hits = losses_and_hits(self.model, inputs, labels)
            scored = labels.to(hits.device) != IGNORED_LABEL
            exact = (hits | ~scored).all(1).tolist()
            for row, loss, is_exact in zip(rows, losses.double().sum(1).tolist(), exact, strict=True):
                found[row] = (-loss, is_exact)
        return [found[row] for row in range(len(pairs))]

    def document_log_likelihoods(self, documents: Sequence[str]) -> list[float]:
        """Of each whole text, in nats; with `longest` in parts of so many tokens, read one by one."""
        found = []
        parts = [self._parts(document) for document in documents]
        total, done = sum(labels.numel() for part in parts for _, labels in part), 0
        for part in parts:
            nats = 0.0
            for inputs, labels in part:
                nats += float(next_token_losses(self.model, inputs, labels).double().sum())
                done += labels.numel()
                self._watch(done, total)
            found.append(-nats)
        return found

    def write(self, requests: Sequence[Writing]) -> list[str]:
        """What follows each prompt, without the stop that ended it."""
        separator = self.tokenizer.separator_id
        prompts = [self._cut([separator, *self._encode(request.prompt)]) for request in requests]
        found: dict[int, str] = {}
        ways = [(request.tokens, request.temperature) for request in requests]
        for rows in self._batches([len(ids) for ids in prompts], ways):
            tokens, temperature = ways[rows[0]]
            stops = [requests[row].stops for row in rows]

            def finished(row: int, ids: list[int], stops: Sequence[tuple[str, ...]] = stops) -> bool:
                text = self.tokenizer.decode(ids)
                return ids[-1] == separator or any(stop in text for stop in stops[row])

            ids = torch.tensor([prompts[row] for row in rows])
            written = write_on(self.model, ids, tokens, finished, self._choice(temperature, rows[0]))
            for row, answer in zip(rows, written, strict=True):
                kept = answer[:-1] if answer[-1] == separator else answer
                found[row] = until(self.tokenizer.decode(kept), requests[row].stops)
        return [found[row] for row in range(len(requests))]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).tolist()
        return ids

    def _cut(self, ids: list[int]) -> list[int]:
        return ids if self.longest is None else ids[-self.longest :]

    def _pair(self, context: str, continuation: str) -> tuple[list[int], int]:
        """Ids of both, and how many of them are the continuation's; spaces between count as its."""
        bare = context.rstrip()
        continuation = context[len(bare) :] + continuation
        whole = [self.tokenizer.separator_id, *self._encode(bare + continuation)]
        scored = max(len(whole) - 1 - len(self._encode(bare)), 0)
        return (whole if self.longest is None else whole[-self.longest - 1 :]), scored

    def _tensors(self, sequences: Sequence[tuple[list[int], int]]) -> tuple[Tensor, Tensor]:
        """Inputs and labels [B, T] of sequences of one length; labels of contexts are ignored."""
        whole = torch.tensor([ids for ids, _ in sequences])
        labels = whole[:, 1:].clone()
        for row, (ids, scored) in enumerate(sequences):
            labels[row, : max(len(ids) - 1 - scored, 0)] = IGNORED_LABEL
        return whole[:, :-1], labels

    def _parts(self, document: str) -> list[tuple[Tensor, Tensor]]:
        ids = [self.tokenizer.separator_id, *self._encode(document)]
        step = self.longest or len(ids)
        starts = range(0, len(ids) - 1, step)
        parts = [torch.tensor([ids[start : start + step + 1]]) for start in starts]
        return [(part[:, :-1], part[:, 1:]) for part in parts]

    def _batches(self, lengths: Sequence[int], ways: Sequence[object] | None = None) -> Iterator[list[int]]:
        """Rows of one length, and read in one way; the longest first: what does not fit fails early."""
        groups: dict[tuple[int, object], list[int]] = {}
        for row, length in enumerate(lengths):
            groups.setdefault((length, ways[row] if ways else None), []).append(row)
        done = 0
        for (length, _), rows in sorted(groups.items(), key=lambda group: -group[0][0]):
            step = rows_at_once(self.model, length)
            for first in range(0, len(rows), step):
                yield rows[first : first + step]
                done += length * len(rows[first : first + step])
                self._watch(done, sum(lengths))

    def _choice(self, temperature: float, row: int) -> "Choice":
        return Choice(temperature, torch.Generator().manual_seed(self._seed + row))


@dataclass(frozen=True)
class Choice:
    """logits [B, V] -> ids [B]: the most likely at temperature 0, else drawn on the CPU."""

    temperature: float
    generator: torch.Generator

    def __call__(self, logits: Tensor) -> Tensor:
        if self.temperature == 0:
            return logits.argmax(-1)
        probabilities = (logits.cpu() / self.temperature).softmax(-1)
        return torch.multinomial(probabilities, 1, generator=self.generator)[:, 0]


def until(text: str, stops: Sequence[str]) -> str:
    """The text before the first of `stops`."""
    ends = [text.find(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text


def writing_of(prompt: str, settings: Mapping[str, object]) -> Writing:
    """A request with the names that Hugging Face's `generate` and the harness use."""
    stops = settings.get("until") or ()
    tokens = settings.get("max_gen_toks") or settings.get("max_new_tokens") or LONGEST_ANSWER
    temperature = float(str(settings.get("temperature", 0.0) or 0.0))
    if not settings.get("do_sample", temperature > 0):
        temperature = 0.0
    words = [stops] if isinstance(stops, str) else list(stops) if isinstance(stops, Sequence) else []
    return Writing(prompt, tuple(str(word) for word in words if word), int(str(tokens)), temperature)
