"""`needle`: how often a model finds a value in a long text, by length and depth."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from random import Random
from typing import Any

from kvm_dist.evaluate.documents import texts
from kvm_dist.evaluate.needle import NEEDLE_TASKS, REPEATED, Haystack, NeedleTask, Prompt, make_prompt
from kvm_dist.evaluate.needle_score import answers, found
from kvm_dist.evaluate.reading import rows_at_once
from kvm_dist.evaluate.tasks import Options, Outcome, Watch
from kvm_dist.exit_codes import ConfigError
from kvm_dist.pretrained import Pretrained

DEFAULT_DEPTHS = tuple(tenth / 10 for tenth in range(11))
_CONTEXTS = (0.5, 1, 2, 4)  # default lengths, in training contexts


@dataclass(frozen=True)
class Cell:
    """One field of the heat map: `found` of `samples` answers contained their value."""

    needle: str
    tokens: int
    depth: float
    found: int
    samples: int


def evaluate(opened: Pretrained, options: Options, watch: Watch) -> Outcome:
    """Prompt and room for the answer together take each length; one seed gives one set of prompts."""
    tasks = [_task(name) for name in options.needles or NEEDLE_TASKS]
    lengths = sorted(set(options.tokens)) or _default_lengths(opened, tasks)
    depths = sorted(set(options.depths)) or list(DEFAULT_DEPTHS)
    haystacks, source = _haystacks(opened, options, tasks, max(lengths))
    groups = [(task, length) for task in tasks for length in lengths]
    prompts = {
        (task.name, length): _prompts(opened, task, haystacks[task.repeated], length, depths, options)
        for task, length in groups
    }
    cells: list[Cell] = []
    samples: list[dict[str, Any]] = []
    done, total = 0, sum(length * len(depths) * options.samples for _, length in groups)
    for task, length in groups:
        asked, given = prompts[task.name, length], list[str]()
        rows = rows_at_once(opened.model, length)
        for first in range(0, len(asked), rows):
            part = asked[first : first + rows]
            given += answers(opened.model, opened.tokenizer, part, task.answer_tokens(opened.tokenizer))
            done += length * len(part)
            watch(done, total)
        cells += _cells(task, length, depths, asked, given, options.samples)
        samples += _told(task, length, asked, given)
    settings = {
        "haystack": source,
        "lengths": lengths,
        "depths": depths,
        "samples": options.samples,
        "seed": options.seed,
        "training_context": opened.training_context,
    }
    return Outcome(
        metrics=_scores(cells),
        details={"cells": [asdict(cell) for cell in cells], "answers": samples},
        settings=settings,
        columns=("needle", "tokens", "found", *(f"at {depth:.0%}" for depth in depths)),
        rows=_rows(cells),
    )


def _task(name: str) -> NeedleTask:
    if name not in NEEDLE_TASKS:
        near = get_close_matches(name.upper(), NEEDLE_TASKS, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"--needle {name}: unknown needle{meant}; needles are {', '.join(NEEDLE_TASKS)}")
    return NEEDLE_TASKS[name]


def _default_lengths(opened: Pretrained, tasks: Sequence[NeedleTask]) -> list[int]:
    """A half to four training contexts, as far as they hold the words of every needle."""
    shortest = max(task.shortest(opened.tokenizer) for task in tasks)
    lengths = [int(share * opened.config.data.sequence_length) for share in _CONTEXTS]
    fitting = [length for length in lengths if length >= shortest]
    if not fitting:
        raise ConfigError(
            f"four training contexts of {opened.config.data.sequence_length:,} tokens do not hold the words "
            "of a needle; give --tokens"
        )
    return fitting


def _haystacks(
    opened: Pretrained, options: Options, tasks: Sequence[NeedleTask], longest: int
) -> tuple[dict[bool, Haystack], str]:
    """The haystack of repeated sentences and that of text, and where the text is from."""
    haystacks = {True: Haystack(REPEATED, opened.tokenizer)}
    if all(task.repeated for task in tasks):
        return haystacks, "repeated sentences"
    data = options.data or opened.config.data.path
    found, source = texts(options.haystack, data, opened.tokenizer, characters=16 * longest)
    try:
        haystacks[False] = Haystack(found, opened.tokenizer)
    except ValueError as error:
        raise ConfigError(f"--haystack {source}: {error}") from error
    return haystacks, source


def _prompts(
    opened: Pretrained,
    task: NeedleTask,
    haystack: Haystack,
    length: int,
    depths: Sequence[float],
    options: Options,
) -> list[Prompt]:
    """`samples` prompts a depth, depth after depth."""
    tokenizer = opened.tokenizer
    room = task.answer_tokens(tokenizer)
    places = [(depth, sample) for depth in depths for sample in range(options.samples)]
    try:
        return [
            make_prompt(
                task, haystack, tokenizer, length - room, place[0], _random(options.seed, task, length, place)
            )
            for place in places
        ]
    except ValueError as error:
        raise ConfigError(
            f"--tokens {length:,}, of which {room:,} are for the answer: {error}, such as "
            f"{task.shortest(tokenizer):,}"
        ) from error


def _random(seed: int, task: NeedleTask, length: int, place: tuple[float, int]) -> Random:
    """Its own for every prompt, whatever else is asked: one that is asked again is the same."""
    depth, sample = place
    return Random(f"{seed} {task.name} {length} {depth} {sample}")


def _cells(
    task: NeedleTask,
    length: int,
    depths: Sequence[float],
    asked: Sequence[Prompt],
    given: Sequence[str],
    samples: int,
) -> list[Cell]:
    hits = [found(prompt, answer) for prompt, answer in zip(asked, given, strict=True)]
    return [
        Cell(task.name, length, depth, sum(hits[number * samples : (number + 1) * samples]), samples)
        for number, depth in enumerate(depths)
    ]


def _told(
    task: NeedleTask, length: int, asked: Sequence[Prompt], given: Sequence[str]
) -> list[dict[str, Any]]:
    """Every question and its answer, for whoever wants to know how it went wrong."""
    return [
        {
            "needle": task.name,
            "tokens": length,
            "depth": round(prompt.depth, 4),
            "key": prompt.key,
            "value": prompt.value,
            "answer": answer,
        }
        for prompt, answer in zip(asked, given, strict=True)
    ]


def _scores(cells: Sequence[Cell]) -> dict[str, float]:
    """Share of samples found: `NEEDLE/LENGTH`, and over all lengths `NEEDLE/all`."""
    scores = {}
    for name in dict.fromkeys(cell.needle for cell in cells):
        own = [cell for cell in cells if cell.needle == name]
        for length in dict.fromkeys(cell.tokens for cell in own):
            scores[f"{name}/{length}"] = _share([cell for cell in own if cell.tokens == length])
        scores[f"{name}/all"] = _share(own)
    return scores


def _share(cells: Sequence[Cell]) -> float:
    return sum(cell.found for cell in cells) / sum(cell.samples for cell in cells)


def _rows(cells: Sequence[Cell]) -> list[tuple[str, ...]]:
    """One row for each needle and length: the share found, then that at every depth."""
    rows = []
    for name, length in dict.fromkeys((cell.needle, cell.tokens) for cell in cells):
        own = [cell for cell in cells if (cell.needle, cell.tokens) == (name, length)]
        shares = [f"{cell.found / cell.samples:.0%}" for cell in own]
        rows.append((name, f"{length:,}", f"{_share(own):.1%}", *shares))
    return rows
