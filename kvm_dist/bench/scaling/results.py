"""Everything one `bench scaling` found: measured on this machine, and modelled. Imports no torch."""

import os
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from kvm_dist.bench.scaling.cluster import CLUSTERS
from kvm_dist.bench.scaling.cuts import GROWTH_COST
from kvm_dist.bench.scaling.extrapolate import CHAINS, HEADLINES, Modelled, Sensitivity
from kvm_dist.bench.scaling.measured import Goal, Measured

MODELLED_NOTE = (
    "modelled: replayed from assumed rates, not measured; forward and backward of one micro-batch unless it"
    " says more, 7B parameters (32 layers, 32 heads of 128), bf16. Shards: of equal modelled time, nearly "
    "those of parallel.growth_cost=3 to 3.5; by FLOPs: of the default 1. In turns: every second micro-batch"
    " begins on the last rank (parallel.alternate_chain); more micro-batches in one direction are as "
    "efficient as one. Two ways at once: pairs, one from either end (parallel.two_way_chain), of shards of "
    f"growth_cost={GROWTH_COST}; more pairs are as efficient as one. A rank holds both of a pair: N sequences"
    " in a micro-batch take the memory of 2 N. Turns and pairs need ranks that do not meet after every "
    "micro-batch: ZeRO 0 and 1. 2-D: KVM by heads inside nodes of 8, which swap tensors beside their "
    "computing, or its routing alone (parallel.head_parallel, parallel.node_splits). Head groups: of the "
    "heads of one device (parallel.head_groups)"
)


@dataclass(frozen=True)
class Results:
    """measured: None where only the model was asked for."""

    measured: Measured | None
    modelled: list[Modelled]
    sensitivities: list[Sensitivity]
    machine: dict[str, Any]

    def goals(self) -> Iterator[Goal]:
        """What was measured, and of each modelled headline the settings that are best."""
        if self.measured is not None:
            yield from self.measured.goals()
        best: dict[tuple[str, bool, int, int], Goal] = {}
        for one in HEADLINES:
            for row in self.modelled:
                if not one.is_of(row) or not row.efficiency:
                    continue
                goal = Goal(f"modelled efficiency, {row.device}, {one.label}", one.wanted, row.efficiency)
                aim = (row.device, one.method in CHAINS, one.tokens, one.ranks)
                best[aim] = max(best.get(aim, goal), goal, key=lambda goal: goal.got)
        yield from best.values()

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "measured": None if self.measured is None else self.measured.as_json(),
            "modelled_note": MODELLED_NOTE,
            "modelled_constants": [asdict(cluster) for cluster in CLUSTERS.values()],
            "modelled": [row.as_json() for row in self.modelled],
            "modelled_sensitivities": [asdict(row) for row in self.sensitivities],
            "goals": [asdict(goal) | {"met": goal.met} for goal in self.goals()],
        }


def machine() -> dict[str, Any]:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "processor": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "load_average_start": os.getloadavg()[0],
    }
