"""The collectives of a replayed step: who has begun which, and when each is done. Imports no torch."""

from collections import deque
from dataclasses import dataclass, field

from kvm_dist.bench.scaling.program import Begin, End


@dataclass(eq=False)
class _Collective:
    """came: members that have begun it; ends: when it is done for each, empty while some are missing."""

    name: str
    came: dict[int, tuple[float, float]] = field(default_factory=dict)  # rank -> when, how long it takes
    ends: dict[int, float] = field(default_factory=dict)


@dataclass
class _Group:
    """Ranks that have one collective at a time. incomplete: those that some have begun, in their order."""

    members: tuple[int, ...]
    free: float = 0.0
    incomplete: deque[_Collective] = field(default_factory=deque)

    def begin(self, rank: int, now: float, step: Begin) -> _Collective:
        """Every member begins the same ones in the same order."""
        if rank not in self.members:
            raise ValueError(
                f"rank {rank} begins {step.name!r} of ranks {self.members}, to which it is foreign"
            )
        found = next((one for one in self.incomplete if rank not in one.came), None)
        if found is None:
            found = _Collective(step.name)
            self.incomplete.append(found)
        elif found.name != step.name:
            other = next(iter(found.came))
            raise ValueError(
                f"ranks meet in different collectives: rank {rank} begins {step.name!r}, rank {other} began "
                f"{found.name!r}"
            )
        found.came[rank] = now, step.seconds
        if len(found.came) == len(self.members):
            self._run(found)
        return found

    def _run(self, one: _Collective) -> None:
        """one: the first of the incomplete, as whoever has begun it has begun those before."""
        self.incomplete.popleft()
        start = max(self.free, *(now for now, _ in one.came.values()))
        one.ends = {rank: start + seconds for rank, (_, seconds) in one.came.items()}
        self.free = max(one.ends.values())


class Collectives:
    """ranks: of the step."""

    def __init__(self, ranks: int) -> None:
        self._all = tuple(range(ranks))
        self._groups: dict[tuple[int, ...], _Group] = {}
        self._begun: dict[tuple[int, tuple[int, ...], str], _Collective] = {}  # and not ended, by rank

    def begin(self, rank: int, now: float, step: Begin) -> tuple[int, ...]:
        """Members that need no longer wait for this one."""
        members = step.members or self._all
        key = (rank, members, step.name)
        if key in self._begun:
            raise ValueError(f"rank {rank} begins {step.name!r} again before it has ended it")
        group = self._groups.setdefault(members, _Group(members))
        found = self._begun[key] = group.begin(rank, now, step)
        return members if found.ends else ()

    def end(self, rank: int, step: End) -> float | None:
        """When it is done for this rank; None while some have not begun it."""
        key = (rank, step.members or self._all, step.name)
        found = self._begun.get(key)
        if found is None:
            raise ValueError(f"rank {rank} ends {step.name!r} of ranks {key[1]} without having begun it")
        if not found.ends:
            return None
        del self._begun[key]
        return found.ends[rank]

    def check_ended(self) -> None:
        for rank, _, name in self._begun:
            raise ValueError(f"rank {rank} never ends {name!r}, which it began")
