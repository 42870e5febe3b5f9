"""`memory`: what the KVM layers keep of a document, what they merge, and which slots they read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvm_dist.data.documents import Document, find_pieces, read_documents
from kvm_dist.data.tokenizer import require_ids_below
from kvm_dist.evaluate.documents import LongDocuments, after_separator, held_out_data
from kvm_dist.evaluate.memory_slots import heat, most_selective_head, slot_texts
from kvm_dist.evaluate.memory_summary import growth, layer_summary, other_states
from kvm_dist.evaluate.memory_watch import DocumentMemory, read_document
from kvm_dist.evaluate.tasks import Options, Outcome, Watch
from kvm_dist.exit_codes import ConfigError, DataError
from kvm_dist.pretrained import Pretrained
from models.config import KVMConfig, ModelConfig

DEFAULT_DOCUMENTS = 4
_BYTES_A_TOKEN = 32  # more than any tokenizer has on average: so many are enough
_COLUMNS = (
    "layer",
    "slots",
    "tokens each",
    "fullest",
    "cosine",
    "sinks",
    "state",
    "window",
    "in use",
    "age",
)


def evaluate(opened: Pretrained, options: Options, watch: Watch) -> Outcome:
    """Documents are read one at a time, after a separator, up to --tokens (the training context) of each.

    The argument LAYER.HEAD, counted from 1, chooses the head whose slots are shown; without one it is the
    head that tells its slots apart most.
    """
    window = _window(opened.config.model)
    tokens = options.one_length(max(opened.config.data.sequence_length, 2 * window))
    if tokens <= window:
        raise ConfigError(f"--tokens {tokens}: nothing leaves a window of {window}; give more")
    chosen = _chosen_head(options.argument, opened.config.model)
    documents, origin = _documents(opened, options, tokens)
    total, before, found = sum(len(one) for one in documents), 0, []
    for document in documents:
        told = _after(before, total, watch)
        found.append(read_document(opened.model, document.to(opened.device), told))
        before += len(document)
    return _outcome(opened, found, origin, chosen)


def _after(before: int, total: int, watch: Watch) -> Callable[[int], None]:
    """Tells `watch` of tokens that are read after those of earlier documents."""
    return lambda done: watch(before + done, total)


def _window(model: ModelConfig) -> int:
    config = model.used_layer_configs.get("kvm")
    if not isinstance(config, KVMConfig):
        raise ConfigError(
            f"--task memory: the model has no KVM layer, its layers are {model.layers}; nothing to show"
        )
    return config.chunk * config.window_chunks


def _documents(opened: Pretrained, options: Options, tokens: int) -> tuple[list[torch.Tensor], str]:
    """Documents [t] of at most `tokens` tokens, each behind a separator, and where they come from."""
    limit, window = options.limit or DEFAULT_DOCUMENTS, _window(opened.config.model)
    if options.haystack is not None:
        found, origin = _texts(opened, options.haystack, tokens), str(options.haystack)
    else:
        index = held_out_data(options.data, opened)
        longest = max(LongDocuments(index, 1, None).lengths)
        found, origin = iter(LongDocuments(index, min(tokens, longest), limit)), str(index.directory)
    long_enough = (one[:tokens] for one in found if one[:tokens].size > window)
    documents = [after_separator(one, opened.tokenizer)[0][0] for one in islice(long_enough, limit)]
    if not documents:
        raise DataError(
            f"{origin}: no document of more than {window:,} tokens, so nothing leaves the window; "
            "give other data with --data DIR or --haystack FILE"
        )
    return documents, origin


def _texts(opened: Pretrained, source: Path, tokens: int) -> Iterator[np.ndarray]:
    """Documents of a file or a folder, cut behind `tokens` tokens; a text file is one document."""
    pieces, most = find_pieces(str(source)), _BYTES_A_TOKEN * tokens
    found: Iterator[Document] = (document for piece in pieces for document in read_documents(piece))
    if source.is_file() and pieces[0].kind == "text":
        content = b""
        while len(content) < most and (part := next(found, None)):
            content += part.content
        found = iter([Document(content)])
    for document in found:
        if document.tokens is None:
            yield opened.tokenizer.encode(document.content[:most])
        else:
            require_ids_below(document.tokens, opened.config.model.vocab_size, str(source))
            yield document.tokens


def _outcome(
    opened: Pretrained, found: Sequence[DocumentMemory], origin: str, chosen: tuple[int, int] | None
) -> Outcome:
    longest = max(found, key=lambda one: len(one.tokens))
    place, head = chosen or most_selective_head(longest)
    shown = longest.layers[place]
    layers = [layer_summary([one.layers[number] for one in found]) for number in range(len(longest.layers))]
    tokens = len(longest.tokens)
    name = f"{opened.name}, step {opened.step:,}" if opened.step else opened.name
    source = Path(origin).name
    details = {
        "subtitle": f"{name}: {_counted(len(found), 'document')} of up to {tokens:,} tokens from {source}",
        "heat_subtitle": f"{name}: a document of {tokens:,} tokens from {source}",
        "growth": growth(shown),
        "layers": layers,
        "other_states": other_states(found),
        "heat": {"layer": shown.index, "head": head, **heat(shown, head)},
        "slots": slot_texts(longest, shown, head, opened.tokenizer),
    }
    settings = {
        "data": origin,
        "documents": len(found),
        "tokens": tokens,
        "layer": shown.index + 1,
        "head": head + 1,
    }
    return Outcome(_metrics(details), details, settings, _COLUMNS, _rows(details))


def _chosen_head(argument: str, model: ModelConfig) -> tuple[int, int] | None:
    """Place among the KVM layers, and head; None where it is left open."""
    if not argument:
        return None
    layer, _, head = argument.partition(".")
    if not (layer.isdecimal() and head.isdecimal()):
        raise ConfigError(f"--task memory:{argument}: want memory:LAYER.HEAD, counted from 1, or memory")
    layers = [number for number, kind in enumerate(model.layer_kinds, start=1) if kind == "kvm"]
    if int(layer) not in layers or not 1 <= int(head) <= model.num_heads:
        raise ConfigError(
            f"--task memory:{argument}: KVM layers are {', '.join(map(str, layers))}, "
            f"heads 1 to {model.num_heads}"
        )
    return layers.index(int(layer)), int(head) - 1


def _metrics(details: Mapping[str, Any]) -> dict[str, float]:
    """Over all layers and heads: the shares of attention, and how alike merged tokens and slots are."""
    folds = details["growth"]["folds"]
    merged, appended = (sum(fold[name] for fold in folds) for name in ("merged", "appended"))
    found = {
        "slots": float(details["growth"]["slots"][-1]),
        "merged_share": merged / max(merged + appended, 1),
        "merged_cosine": _mean([layer["similarity"]["all"]["mean"] for layer in details["layers"]]),
        **{
            f"{name}_share": _mean([one for layer in details["layers"] for one in layer["by_head"][name]])
            for name in ("sinks", "state", "window")
        },
    }
    return {name: value for name, value in found.items() if value is not None}


def _rows(details: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Of each layer its slots, the tokens in one, the fullest slot's, the cosine of merged tokens and slots,
    the shares of attention, the slots that hold 90 % of the state's share, and the age in tokens of what is
    read; of layers of other kinds what stands for their size."""
    slots = details["growth"]["slots"][-1]
    rows = {}
    for layer in details["layers"]:
        full, shares = layer["tokens_per_slot"], layer["by_head"]
        rows[layer["name"]] = (
            f"{slots:,}",
            f"{full['mean']:.1f}",
            f"{full['largest']:,.0f}",
            _shown(layer["similarity"]["all"]["mean"], ".2f"),
            *(_shown(_mean(shares[name]), ".1%") for name in ("sinks", "state", "window")),
            _shown(layer["slots_in_use"][-1], ",.0f"),
            _shown(layer["age_opened"][-1], ",.0f"),
        )
    for name, state in details["other_states"].items():
        held = f"{state['measure'].split()[0]} {_shown(state['values'][-1], ',.4g')}"
        rows[name] = (held, *([""] * (len(_COLUMNS) - 2)))
    ordered = sorted(rows, key=lambda name: int(name.split(".")[0]))
    return [(f"{int(name.split('.')[0]) + 1} {name.split('.')[1]}", *rows[name]) for name in ordered]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
