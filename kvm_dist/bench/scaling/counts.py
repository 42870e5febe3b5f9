"""Messages and bytes over every shard edge: by the closed forms, and as the ranks of a step logged them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from models.config import ModelConfig
from models.messages import edge_messages


@dataclass(frozen=True)
class Count:
    """What one rank sends in one phase of one layer, for one sequence. recorded: None where none ran."""

    rank: int
    layer: int
    phase: str
    messages: int
    bytes: int
    recorded_messages: int | None = None
    recorded_bytes: int | None = None

    @property
    def agrees(self) -> bool:
        recorded = (self.recorded_messages, self.recorded_bytes)
        return self.recorded_bytes is None or recorded == (self.messages, self.bytes)


def counts(
    model: ModelConfig,
    spans: Sequence[tuple[int, int]],
    element_bytes: int,
    recorded: Sequence[Iterable[dict[str, Any]]] | None = None,
) -> list[Count]:
    """One row per rank, layer and phase. recorded: the messages of every rank of one real step."""
    rows = []
    for rank in range(len(spans)):
        messages, size = _closed_forms(model, spans, rank, element_bytes)
        logged = _recorded(recorded[rank]) if recorded is not None else None
        keys = sorted(
            {*messages, *(logged[0] if logged else ())}, key=lambda key: (key[1] != "forward", key[0])
        )
        rows += [
            Count(
                rank,
                layer,
                phase,
                messages[layer, phase],
                size[layer, phase],
                None if logged is None else logged[0][layer, phase],
                None if logged is None else logged[1][layer, phase],
            )
            for layer, phase in keys
        ]
    return rows


Tally = Counter[tuple[int, str]]


def _closed_forms(
    model: ModelConfig, spans: Sequence[tuple[int, int]], rank: int, element_bytes: int
) -> tuple[Tally, Tally]:
    """Rank r sends forward over its end, backward over its start."""
    messages, size = Tally(), Tally()
    edges = {"forward": spans[rank][1] if rank < len(spans) - 1 else None}
    edges["backward"] = spans[rank][0] if rank else None
    for phase, edge in edges.items():
        for one in edge_messages(model, edge) if edge is not None else ():
            if one.phase == phase:
                messages[one.layer, phase] += 1
                size[one.layer, phase] += one.size(element_bytes)
    return messages, size


def _recorded(events: Iterable[dict[str, Any]]) -> tuple[Tally, Tally]:
    messages, size = Tally(), Tally()
    for event in events:
        if event["operation"] == "send":
            messages[event["layer"], event["phase"]] += 1
            size[event["layer"], event["phase"]] += event["bytes"]
    return messages, size
