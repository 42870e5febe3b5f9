"""Tensors that ranks give each other their parts of, as steps of one rank. Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvm_dist.bench.scaling.cluster import Cluster
from kvm_dist.bench.scaling.program import Begin, End, Step, Work


@dataclass(frozen=True)
class Swap:
    """Seconds of packing, of the links and of unpacking, the rank's own part included.

    Packing and unpacking are work of the rank; the links carry while it goes on.
    """

    copy: float
    links: float
    members: tuple[int, ...] = ()

    @classmethod
    def of(cls, cluster: Cluster, size: float, ranks: int, members: tuple[int, ...] = ()) -> "Swap":
        """size: bytes that each of `ranks` packs, and as many that it unpacks."""
        return cls(cluster.copy_seconds(size), cluster.all_to_all_seconds(ranks, size), members)

    def start(self, name: str, phase: str, layer: int | None = None) -> Iterator[Step]:
        yield Work("pack", self.copy, phase, layer)
        yield Begin(name, self.links, self.members)

    def land(self, name: str, phase: str, layer: int | None = None) -> Iterator[Step]:
        yield End(name, self.members)
        yield Work("unpack", self.copy, phase, layer)

    def at_once(self, name: str, phase: str, layer: int | None = None) -> Iterator[Step]:
        yield from self.start(name, phase, layer)
        yield from self.land(name, phase, layer)
