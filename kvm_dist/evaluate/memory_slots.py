"""One head's slots over a document: when each is read, and the texts that it is made of."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kvm_dist.data.tokenizer import Tokenizer
from kvm_dist.evaluate.memory_watch import DocumentMemory, LayerMemory

MOST_ROWS, MOST_COLUMNS = 160, 128  # cells of the heat map
SLOTS_SHOWN, MERGED_SHOWN = 12, 3
CONTEXT_CHARACTERS = 18


def most_selective_head(document: DocumentMemory) -> tuple[int, int]:
    """Place among the KVM layers, and query head, that tells its slots apart most: the one to look at."""
    found = torch.stack([_selectivity(layer) for layer in document.layers])
    layer, head = divmod(int(found.argmax()), found.shape[1])
    return layer, head


def heat(layer: LayerMemory, head: int) -> dict[str, Any]:
    """Reads of slots over time, in cells: rows are slots by their age, columns are blocks of tokens.

    A cell is the mean share of attention of one slot, over its slots and blocks; None before they exist.
    """
    reads = [read for read in layer.reads if read.block.slots]
    slots = reads[-1].block.slots if reads else 0
    rows, columns = _edges(slots, MOST_ROWS), _edges(len(reads), MOST_COLUMNS)
    mass = torch.full((slots, len(reads)), torch.nan, dtype=torch.double)
    for column, read in enumerate(reads):
        mass[: read.block.slots, column] = read.by_slot[head].double().cpu()
    cells = [
        [_mean(mass[top:bottom, left:right]) for left, right in pairwise(columns)]
        for top, bottom in pairwise(rows)
    ]
    starts = [reads[column].block.start for column in columns[:-1]]
    return {
        "slot_edges": rows,
        "token_edges": [*starts, reads[-1].block.stop] if reads else [],
        "mass": cells,
    }


def slot_texts(document: DocumentMemory, layer: LayerMemory, head: int, tokenizer: Tokenizer) -> list[Any]:
    """The slots that are read most over the document, first to last, and the tokens they are made of."""
    read_mass = _read_mass(layer, head)
    if not len(read_mass):
        return []
    memory_head = head // (len(layer.reads[0].window) // layer.lives.tokens.shape[0])
    positions, slots, similarity = _folded_tokens(layer, memory_head)
    found = []
    for slot in read_mass.argsort(descending=True, stable=True)[:SLOTS_SHOWN].tolist():
        inside = (slots == slot) & ~similarity.isnan()
        best = similarity.masked_fill(~inside, -torch.inf).argsort(descending=True, stable=True)
        merged = best[: min(MERGED_SHOWN, int(inside.sum()))].tolist()
        opened_by = int(layer.lives.opened_by[memory_head, slot])
        found.append(
            {
                "slot": slot,
                "sink": slot < layer.settings.sinks,
                "share_of_state_reads": round((read_mass[slot] / read_mass.sum()).item(), 6),
                "tokens": int(layer.lives.tokens[memory_head, slot]),
                "opened_by": _text(document.tokens, opened_by, tokenizer),
                "most_similar": [
                    {
                        **_text(document.tokens, int(positions[at]), tokenizer),
                        "similarity": round(similarity[at].item(), 4),
                    }
                    for at in merged
                ],
            }
        )
    return found


def _folded_tokens(layer: LayerMemory, memory_head: int) -> tuple[Tensor, Tensor, Tensor]:
    """Position, slot and similarity of every token in the state of one key-value head."""
    return (
        torch.cat([torch.arange(one.fold.start, one.fold.stop) for one in layer.folds]),
        torch.cat([one.slot[:, memory_head].cpu() for one in layer.folds]),
        torch.cat([one.similarity[:, memory_head].cpu() for one in layer.folds]),
    )


def _read_mass(layer: LayerMemory, head: int) -> Tensor:
    """[m] attention to each slot, summed over the queries of the document."""
    reads = [read for read in layer.reads if read.block.slots]
    total = torch.zeros(reads[-1].block.slots if reads else 0, dtype=torch.double)
    for read in reads:
        total[: read.block.slots] += read.by_slot[head].double().cpu() * (read.block.stop - read.block.start)
    return total


def _selectivity(layer: LayerMemory) -> Tensor:
    """[H] attention to slots that are no sinks, times its distance (KL, nats) from reading all alike;
    a mean over the later half of the reads that have a state."""
    sinks, reads = layer.settings.sinks, [read for read in layer.reads if read.block.slots]
    found = [torch.zeros(len(layer.reads[0].window), dtype=torch.double)]
    for read in reads[len(reads) // 2 :]:
        mass = read.by_slot[:, sinks:].double().cpu()
        total = mass.sum(dim=-1)
        even = (total / max(mass.shape[1], 1))[:, None]
        found.append(torch.special.xlogy(mass, mass / even).sum(dim=-1))
    return torch.stack(found).sum(dim=0) / max(len(found) - 1, 1)


def _text(tokens: Tensor, position: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """A token and what stands around it."""

    def decoded(start: int, stop: int) -> str:
        return tokenizer.decode(tokens[max(start, 0) : stop].tolist())

    return {
        "position": position,
        "before": decoded(position - CONTEXT_CHARACTERS, position)[-CONTEXT_CHARACTERS:],
        "text": decoded(position, position + 1),
        "after": decoded(position + 1, position + 1 + CONTEXT_CHARACTERS)[:CONTEXT_CHARACTERS],
    }


def _edges(count: int, most: int) -> list[int]:
    """Edges of at most `most` runs, as even as they can be, of `count` things."""
    runs = min(count, most)
    return [count * run // runs for run in range(runs + 1)] if runs else [0]


def _mean(cells: Tensor) -> float | None:
    present = cells[~cells.isnan()]
    return float(f"{present.mean().item():.3g}") if len(present) else None
