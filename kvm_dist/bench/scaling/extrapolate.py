"""Efficiency of a step on many ranks of H200 and MI325X nodes, by the replay. Everything here is modelled.

Micro-batches of one sequence or several, forward and backward, between which ranks do not meet; reduction and
update, which no method is spared and which accumulation makes rare, are left out. Efficiency: the same
method's step on one rank of unbounded memory, over ranks times the step of all.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from kvm_dist.bench.scaling.accumulated import Accumulation, accumulated
from kvm_dist.bench.scaling.cluster import ASSUMED, CLUSTERS, Cluster, variations
from kvm_dist.bench.scaling.cuts import (
    Cut,
    Spans,
    by_flops,
    by_growth,
    by_length,
    by_seconds,
    nodes_by_growth,
    nodes_by_seconds,
)
from kvm_dist.bench.scaling.opponents import gathered_recurrence, ring_attention, ulysses
from kvm_dist.bench.scaling.program import Program
from kvm_dist.bench.scaling.relays import kvm_relay, rwkv7_relay
from kvm_dist.bench.scaling.replay import Timeline, replay
from kvm_dist.bench.scaling.two_level import kvm_by_heads, kvm_by_routes, one_of_each_node
from kvm_dist.bench.scaling.uncollected import uncollected
from models.budget import Budget, FixedBudget, PowerLawBudget
from models.config import ModelConfig

LENGTHS, RANKS = (32_768, 131_072, 1_048_576), (8, 16, 64)
# Sequences of a micro-batch -> its longest; eight of the longest are more tokens than anybody puts in one.
SEQUENCES = {1: 1_048_576, 4: 32_768, 8: 131_072, 16: 131_072}
FIXED, POWER = FixedBudget(), PowerLawBudget()
MEMBER_GROUPS = 2  # of the heads of a member of a node
ONE, IN_TURNS, IN_PAIRS = Accumulation(), Accumulation(8, "turns"), Accumulation(2, "pairs")
Report = Callable[[str], None]
Programs = Callable[[Cluster, int, int], list[Program] | None]


@dataclass(frozen=True)
class Method:
    """programs: of a micro-batch by (cluster, tokens, ranks), None where the method cannot run.

    in_turns: shown with micro-batches that begin on either end of the ranks in turns, too. pairs: programs
    with which it is shown with micro-batches from both ends at once, too.
    alike_in_nodes: the ranks of a node do the same at the same time, so that the first is replayed for all
    and only those of each node have programs.
    """

    name: str
    programs: Programs
    in_turns: bool = False
    pairs: Programs | None = None
    alike_in_nodes: bool = False

    @property
    def accumulations(self) -> tuple[Accumulation, ...]:
        """Those that make a difference: more micro-batches in one direction are no more efficient, nor are
        more pairs."""
        turns = (IN_TURNS,) if self.in_turns else ()
        return (ONE, *turns, *(() if self.pairs is None else (IN_PAIRS,)))

    def timeline(
        self, cluster: Cluster, tokens: int, ranks: int, accumulation: Accumulation = ONE
    ) -> Timeline | None:
        """Of a step."""
        with uncollected():
            build = self.pairs if self.pairs and accumulation.way == "pairs" else self.programs
            programs = build(cluster, tokens, ranks)
            if programs is None:
                return None
            if self.alike_in_nodes and ranks > 1:
                programs = one_of_each_node(programs, cluster.node_ranks)
                cluster = replace(cluster, node_ranks=1)
            return replay(accumulated(programs, accumulation), cluster)


@dataclass(frozen=True)
class Modelled:
    """One cell of the table. seconds: of all ranks, for one of a micro-batch's sequences; None where the
    method cannot run."""

    device: str
    method: str
    tokens: int
    ranks: int
    sequences: int
    one_rank_seconds: float
    seconds: float | None
    accumulation: Accumulation = ONE

    @property
    def label(self) -> str:
        return self.method if self.accumulation == ONE else f"{self.method}, {self.accumulation.label}"

    @property
    def efficiency(self) -> float | None:
        return None if self.seconds is None else self.one_rank_seconds / self.seconds / self.ranks

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"efficiency": self.efficiency}


@dataclass(frozen=True)
class Headline:
    """wanted: efficiency."""

    method: str
    tokens: int
    ranks: int
    sequences: int
    wanted: float
    accumulation: Accumulation = ONE

    def is_of(self, row: Modelled) -> bool:
        own = (self.method, self.tokens, self.ranks, self.sequences, self.accumulation)
        return own == (row.method, row.tokens, row.ranks, row.sequences, row.accumulation)

    @property
    def label(self) -> str:
        batch = "" if self.sequences == 1 else f", {self.sequences} sequences"
        step = "" if self.accumulation == ONE else f", {self.accumulation.label}"
        return f"{self.method}{batch}{step}, {self.tokens // 1024}K, {self.ranks} ranks"


@dataclass(frozen=True)
class Sensitivity:
    """The efficiency of a headline with one constant halved or doubled."""

    device: str
    headline: Headline
    constant: str
    factor: float
    efficiency: float


def language_model(kind: str, budget: Budget = POWER) -> ModelConfig:
    """A model of 7 billion parameters, all of its layers of one kind."""
    return ModelConfig.model_validate(
        {
            "vocab_size": 65_536,
            "hidden_size": 4096,
            "num_layers": 32,
            "num_heads": 32,
            "layers": [kind],
            "kvm": {"budget": budget},
        }
    )


Build = Callable[[Cluster, ModelConfig, Spans], list[Program]]


def _kvm(budget: Budget, cut: Cut, build: Build = kvm_relay, whole_nodes: bool = False) -> Programs:
    """build: programs of several ranks, from the spans that `cut` finds."""
    model = language_model("kvm", budget)

    def programs(cluster: Cluster, tokens: int, ranks: int) -> list[Program] | None:
        if ranks == 1:
            return kvm_relay(cluster, model, [(0, tokens)])
        if whole_nodes and ranks % cluster.node_ranks:
            return None
        return build(cluster, model, cut(cluster, model, tokens, ranks))

    return programs


def _recurrent(cluster: Cluster, tokens: int, ranks: int) -> list[Program]:
    model = language_model("rwkv7")
    return rwkv7_relay(cluster, model, by_length(cluster, model, tokens, ranks))


_ATTENTION, _RECURRENCE = language_model("full_attention"), language_model("rwkv7")

WAVE = "KVM 16*sqrt"
IN_TWO, IN_FOUR = (f"{WAVE}, {groups} head groups" for groups in (2, 4))  # of all heads
CHAINS = (WAVE, IN_TWO, IN_FOUR)
BY_ROUTES, BY_HEADS = f"{WAVE}, 2-D of routing", f"{WAVE}, 2-D"
BY_HEADS_GROUPED = f"{BY_HEADS}, {MEMBER_GROUPS} head groups"


def _chain(name: str, groups: int = 1, in_turns: bool = False) -> Method:
    build = partial(kvm_relay, groups=groups)
    return Method(name, _kvm(POWER, by_seconds, build), in_turns, _kvm(POWER, by_growth, build))


def _two_dimensions(name: str, groups: int = 1) -> Method:
    build = partial(kvm_by_heads, groups=groups, members=1)
    programs, pairs = (
        _kvm(POWER, cut, build, whole_nodes=True) for cut in (nodes_by_seconds, nodes_by_growth)
    )
    return Method(name, programs, True, pairs, alike_in_nodes=True)


METHODS = (
    Method("KVM-256", _kvm(FIXED, by_seconds)),
    Method(
        "KVM-256, 2-D",
        _kvm(FIXED, nodes_by_seconds, partial(kvm_by_heads, members=1), whole_nodes=True),
        alike_in_nodes=True,
    ),
    _chain(WAVE, in_turns=True),
    Method("KVM 16*sqrt, shards by FLOPs", _kvm(POWER, by_flops)),
    Method("KVM 16*sqrt, equal shards", _kvm(POWER, by_length)),
    _chain(IN_TWO, 2),
    _chain(IN_FOUR, 4),
    Method(BY_ROUTES, _kvm(POWER, by_seconds, kvm_by_routes, whole_nodes=True)),
    _two_dimensions(BY_HEADS),
    _two_dimensions(BY_HEADS_GROUPED, MEMBER_GROUPS),
    Method("RWKV-7, relay", _recurrent),
    Method("RWKV-7, all-gather", lambda c, t, r: gathered_recurrence(c, _RECURRENCE, t, r, transition=True)),
    Method("LASP-2, all-gather", lambda c, t, r: gathered_recurrence(c, _RECURRENCE, t, r, transition=False)),
    Method("full attention, Ulysses", lambda c, t, r: ulysses(c, _ATTENTION, t, r)),
    Method("full attention, ring", lambda c, t, r: ring_attention(c, _ATTENTION, t, r)),
)
_GOALS = (
    (WAVE, 32_768, 8, 0.95, (ONE, IN_TURNS, IN_PAIRS)),
    (IN_TWO, 32_768, 8, 0.95, (IN_PAIRS,)),
    (BY_HEADS, 32_768, 8, 0.95, (ONE,)),  # one node, no chain
    (BY_HEADS, 131_072, 64, 0.90, (ONE, IN_TURNS, IN_PAIRS)),
    (BY_HEADS_GROUPED, 131_072, 64, 0.90, (ONE, IN_TURNS, IN_PAIRS)),
)
HEADLINES = tuple(
    Headline(method, tokens, ranks, sequences, wanted, accumulation)
    for method, tokens, ranks, wanted, accumulations in _GOALS
    for sequences, longest in SEQUENCES.items()
    if tokens <= longest
    for accumulation in accumulations
)
VARIED = tuple(
    one
    for one in HEADLINES
    if (one.sequences == 8 and one.method in (WAVE, BY_HEADS))
    or (one.sequences, one.method, one.accumulation) == (16, BY_HEADS_GROUPED, IN_PAIRS)
)


def method(name: str) -> Method:
    return next(one for one in METHODS if one.name == name)


def extrapolate(lengths: Sequence[int], ranks: Sequence[int], report: Report) -> list[Modelled]:
    """Every method on every device at all lengths and ranks."""
    rows: list[Any] = []
    for device, cluster in CLUSTERS.items():
        for tokens in lengths:
            for one in METHODS:
                report(f"modelled: {device}, {tokens:,} tokens, {one.name}")
                for sequences, longest in SEQUENCES.items():
                    if tokens <= longest:
                        for accumulation in one.accumulations:
                            rows += _rows(cluster, one, tokens, ranks, sequences, accumulation)
    return rows


def _rows(
    cluster: Cluster,
    one: Method,
    tokens: int,
    ranks: Sequence[int],
    sequences: int,
    accumulation: Accumulation = ONE,
) -> Iterator[Modelled]:
    cluster = cluster.with_sequences(sequences)
    alone = one.timeline(cluster, tokens, 1)
    assert alone is not None, "one rank runs everything"
    for count in ranks:
        timeline = one.timeline(cluster, tokens, count, accumulation)
        seconds = None if timeline is None else timeline.seconds / accumulation.micro_batches
        yield Modelled(cluster.name, one.name, tokens, count, sequences, alone.seconds, seconds, accumulation)


def sensitivities(headlines: Sequence[Headline], report: Report) -> list[Sensitivity]:
    """Each headline with every constant halved and doubled, shards cut anew."""
    rows: list[Any] = []
    for device, cluster in CLUSTERS.items():
        for one in headlines:
            report(f"sensitivity: {device}, {one.label}")
            for constant, factor, varied in variations(cluster):
                given = (method(one.method), one.tokens, (one.ranks,), one.sequences, one.accumulation)
                (row,) = _rows(varied, *given)
                assert row.efficiency is not None, "a headline runs"
                rows.append(Sensitivity(device, one, ASSUMED[constant], factor, row.efficiency))
    return rows
