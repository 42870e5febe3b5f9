"""Programs of other ways to split a sequence, each as its authors overlap and balance it; same devices."""

from collections.abc import Iterator

from kvm_dist.bench.scaling.cluster import Cluster
from kvm_dist.bench.scaling.program import Program, Step, Work, collective
from kvm_dist.bench.scaling.swaps import Swap
from kvm_dist.bench.scaling.work import (
    ATTENTION_BACKWARD_FACTOR,
    BACKWARD_FACTOR,
    ELEMENT_BYTES,
    Outside,
    attention_seconds,
    outside,
    recurrence_seconds,
)
from models.config import ModelConfig


def ulysses(cluster: Cluster, model: ModelConfig, tokens: int, ranks: int) -> list[Program] | None:
    """Full attention whose q, k, v and output change from tokens to heads and back (arXiv 2309.14509).

    None where the ranks do not divide the heads.
    """
    if model.num_heads % ranks:
        return None
    core = attention_seconds(cluster, model, tokens, ranks)
    swap = Swap.of(cluster, tokens / ranks * _row_bytes(model), ranks)

    def swaps(phase: str, *names: str) -> Iterator[Step]:
        for name in names if ranks > 1 else ():
            yield from swap.at_once(name, phase)

    forward = [
        *swaps("forward", "queries", "keys", "values"),
        Work("attend", core),
        *swaps("forward", "outputs"),
    ]
    backward = [
        *swaps("backward", "gradients of outputs"),
        Work("attend", ATTENTION_BACKWARD_FACTOR * core, "backward"),
        *swaps("backward", "gradients of queries", "gradients of keys", "gradients of values"),
    ]
    return _programs(model, outside(cluster, model, tokens // ranks), ranks, forward, backward)


def ring_attention(cluster: Cluster, model: ModelConfig, tokens: int, ranks: int) -> list[Program]:
    """Full attention whose keys and values go round a ring while others are read (arXiv 2310.01889).

    Tokens are dealt so that all ranks have equal work in every of R rounds. A backward also moves gradients.
    """
    core = attention_seconds(cluster, model, tokens, ranks) / ranks
    moving = cluster.ring_seconds(ranks, 2 * tokens / ranks * _row_bytes(model)) if ranks > 1 else 0.0
    back = ATTENTION_BACKWARD_FACTOR * core
    forward = core + (ranks - 1) * max(core, moving)
    backward = back + (ranks - 1) * max(back, 2 * moving)
    return _programs(
        model,
        outside(cluster, model, tokens // ranks),
        ranks,
        [*collective("ring", forward)],
        [*collective("ring", backward)],
    )


def gathered_recurrence(
    cluster: Cluster, model: ModelConfig, tokens: int, ranks: int, transition: bool
) -> list[Program]:
    """A linear recurrence whose states are gathered on all ranks in every layer.

    transition: a delta rule, whose shards also give a map [D, D] and need a pass of their own to find map and
    state before the gather, as in flash-linear-attention's context parallel; else the states of linear
    attention alone, as in LASP-2 (arXiv 2502.07563), gathered while the shard's own part is computed.
    """
    core = recurrence_seconds(cluster, model, tokens // ranks)
    state = model.hidden_size * model.rwkv7.head_dim * 4
    sent = state * (2 if transition else 1)
    gather = (ranks - 1) * cluster.ring_seconds(ranks, sent) if ranks > 1 else 0.0

    def mixer(factor: float, phase: str) -> list[Step]:
        own = factor * core
        if ranks == 1:
            return [Work("recurrence", own, phase)]
        if transition:
            return [
                Work("find map and state", own / 2, phase),
                *collective("gather", gather),
                Work("recurrence", own, phase),
            ]
        return [*collective("gather beside the own part", max(gather, own))]

    beside = outside(cluster, model, tokens // ranks)
    return _programs(model, beside, ranks, mixer(1.0, "forward"), mixer(BACKWARD_FACTOR, "backward"))


def _programs(
    model: ModelConfig, beside: Outside, ranks: int, forward: list[Step], backward: list[Step]
) -> list[Program]:
    """All ranks do the same: the mixer's steps between projections and feed-forward parts."""
    layer = [
        Work("project", beside.project),
        *forward,
        Work("feed-forward", beside.output + beside.feed_forward),
    ]
    back = [
        Work("feed-forward", BACKWARD_FACTOR * (beside.output + beside.feed_forward), "backward"),
        *backward,
        Work("project", BACKWARD_FACTOR * beside.project, "backward"),
    ]
    steps = [*layer * model.num_layers, Work("loss", beside.loss), *back * model.num_layers]
    return [steps] * ranks


def _row_bytes(model: ModelConfig) -> int:
    return model.num_heads * model.head_width * ELEMENT_BYTES
