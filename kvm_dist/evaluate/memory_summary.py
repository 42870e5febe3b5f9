"""From what the layers did with documents to numbers of JSON: series over the position, and totals."""

import math
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from kvm_dist.evaluate.memory_watch import DocumentMemory, LayerMemory
from models.kvm.inspection import BlockRead
from models.kvm.inspection_slots import slots_in_use
from models.kvm.layout import KVMSettings, slots_covering, tokens_covered

_QUANTILES = (0.1, 0.5, 0.9)
_RANKED_SLOTS = 200  # points of the curve of slots from the fullest to the emptiest

Series = list[float | None]


def growth(layer: LayerMemory) -> dict[str, Any]:
    """How the state grows, the same in every layer: slots by the tokens read, and each fold's appends."""
    settings = layer.settings
    positions = [read.block.stop for read in layer.reads]
    return {
        "chunk": settings.chunk,
        "window": settings.window,
        "sinks": settings.sinks,
        "positions": positions,
        "slots": [slots_covering(settings, tokens_covered(settings, position)) for position in positions],
        "budget": [_allowed(settings, position) for position in positions],
        "folds": [
            {
                "start": one.fold.start,
                "stop": one.fold.stop,
                "appended": one.fold.appended,
                "merged": one.fold.stop - one.fold.start - one.fold.appended,
            }
            for one in layer.folds
        ],
    }


def layer_summary(documents: Sequence[LayerMemory]) -> dict[str, Any]:
    """One layer over several documents: series are means over heads and over the documents that reach there,
    totals are over all their tokens."""
    first, sinks = documents[0], documents[0].settings.sinks
    gates = [one.gate for layer in documents for one in layer.folds if one.gate is not None]
    return {
        "index": first.index,
        "name": first.name,
        "positions": [read.block.stop for read in max(documents, key=lambda one: len(one.reads)).reads],
        "sinks": _reads(documents, lambda read: read.by_slot[:, :sinks].sum(dim=-1)),
        "state": _reads(documents, lambda read: read.by_slot[:, sinks:].sum(dim=-1)),
        "window": _reads(documents, lambda read: read.window),
        "slots_in_use": _reads(documents, lambda read: _in_use(read, sinks)),
        "age_opened": _mean_series([[ages[0] for ages in one.ages] for one in documents]),
        "age_written": _mean_series([[ages[1] for ages in one.ages] for one in documents]),
        "by_head": _by_head(documents),
        "similarity": _similarity(documents),
        "gate": quantiles(torch.cat(gates)) if gates else None,
        "tokens_per_slot": _tokens_per_slot(documents),
        "radii": _radii(documents),
        "largest_output_difference": max(read.output_difference for one in documents for read in one.reads),
    }


def other_states(documents: Sequence[DocumentMemory]) -> dict[str, dict[str, Any]]:
    """States of layers of other kinds by the tokens read, of the longest document."""
    longest = max(documents, key=lambda one: len(one.tokens))
    return {
        name: {
            "measure": state.measure,
            "positions": state.positions,
            "values": [_number(value) for value in state.values],
        }
        for name, state in longest.other_states.items()
    }


def quantiles(values: Tensor) -> dict[str, float | None]:
    """Mean and quantiles of what is a number; all None if nothing is."""
    values = values.flatten().double()
    values = values[~values.isnan()]
    names = ("mean", *(f"q{round(100 * one)}" for one in _QUANTILES), "largest")
    if not len(values):
        return dict.fromkeys(names)
    found = [values.mean(), *_quantiles(values), values.max()]
    return {name: _number(one.item()) for name, one in zip(names, found, strict=True)}


def _quantiles(values: Tensor) -> Tensor:
    """`torch.quantile` refuses more than 16 million numbers."""
    places = torch.tensor(_QUANTILES, dtype=torch.double) * (len(values) - 1)
    return values.sort().values[places.round().long()]


def _allowed(settings: KVMSettings, position: int) -> int:
    allowed = settings.budget.slots_at(position)
    return allowed if settings.max_slots is None else min(allowed, settings.max_slots)


def _in_use(read: BlockRead, sinks: int) -> Tensor:
    if read.block.slots <= sinks:
        return torch.full((len(read.window),), math.nan)
    return slots_in_use(read, sinks).double()


def _reads(documents: Sequence[LayerMemory], of: Callable[[BlockRead], Tensor]) -> Series:
    return _mean_series([[of(read) for read in layer.reads] for layer in documents])


def _mean_series(documents: Sequence[Sequence[Tensor]]) -> Series:
    """Of each place, the mean over heads and over the documents that reach it."""
    return [
        _number(torch.stack([one.double() for one in place if one is not None]).nanmean().item())
        for place in zip_longest(*documents)
    ]


def _by_head(documents: Sequence[LayerMemory]) -> dict[str, list[float | None]]:
    """Shares of each query head, over all tokens whose blocks read the state."""
    sinks = documents[0].settings.sinks
    reads = [read for layer in documents for read in layer.reads if read.block.slots]
    if not reads:
        return {"sinks": [], "state": [], "window": []}
    lengths = torch.tensor([read.block.stop - read.block.start for read in reads], dtype=torch.double)
    parts = {
        "sinks": [read.by_slot[:, :sinks].sum(dim=-1) for read in reads],
        "state": [read.by_slot[:, sinks:].sum(dim=-1) for read in reads],
        "window": [read.window for read in reads],
    }
    weights = lengths / lengths.sum()
    return {
        name: [_number(one) for one in (weights @ torch.stack(part).double().cpu()).tolist()]
        for name, part in parts.items()
    }


def _similarity(documents: Sequence[LayerMemory]) -> dict[str, Any]:
    """Cosine of merged keys and their slots: of each fold that merges, and of all tokens."""
    longest = max(documents, key=lambda one: len(one.folds))
    places = [
        (longest.folds[at].fold.stop, [one.folds[at].similarity for one in documents if at < len(one.folds)])
        for at, folded in enumerate(longest.folds)
        if folded.fold.stop - folded.fold.start > folded.fold.appended
    ]
    found = [(position, quantiles(torch.cat(parts))) for position, parts in places]
    every = [one.similarity for layer in documents for one in layer.folds]
    return {
        "positions": [position for position, _ in found],
        "mean": [one["mean"] for _, one in found],
        "q10": [one["q10"] for _, one in found],
        "q90": [one["q90"] for _, one in found],
        "all": quantiles(torch.cat(every)) if every else quantiles(torch.empty(0)),
    }


def _tokens_per_slot(documents: Sequence[LayerMemory]) -> dict[str, Any]:
    """How unevenly tokens fill the slots: quantiles, slots of one token, and the ranked curve of the longest
    document, a mean over heads."""
    counts = torch.cat([layer.lives.tokens.flatten() for layer in documents])
    longest = max(documents, key=lambda one: one.lives.tokens.shape[1])
    ranked = longest.lives.tokens.double().sort(dim=-1, descending=True).values.mean(dim=0)
    ranks = sorted({round(one) for one in _geometric(len(ranked), _RANKED_SLOTS)})
    return {
        **quantiles(counts),
        "share_of_one_token": _number((counts == 1).double().mean().item()),
        "ranks": ranks,
        "ranked": [_number(ranked[rank - 1].item()) for rank in ranks],
    }


def _radii(documents: Sequence[LayerMemory]) -> dict[str, float | None] | None:
    radii = [one.state.radii.flatten() for one in documents if one.state and one.state.radii is not None]
    return quantiles(torch.cat(radii)) if radii else None


def _geometric(last: int, count: int) -> list[float]:
    """About `count` numbers from 1 to `last`, each a little more than the one before."""
    return [last ** (step / max(count - 1, 1)) for step in range(count)] if last else []


def _number(value: float) -> float | None:
    """Six digits say enough, and keep the file small; JSON has no NaN."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
