"""Seconds of a layer's operations on a shard, from FLOPs, bytes and launches on a cluster's devices."""

from dataclasses import dataclass
from functools import lru_cache

from kvm_dist.bench.scaling.cluster import Cluster
from models.config import ModelConfig
from models.kinds.attention import projection_flops
from models.kvm.kernels.roofline import kernel_work
from models.kvm.kernels.tuning import TARGETS, Shape, route_programs
from models.kvm.layout import KVMSettings, Plan, plan_call

ELEMENT_BYTES = 2  # bf16 activations
# Hidden widths that norms, shifts, rotary, gates and residuals of a layer read and write per token, each
# operation by itself: before the mixer's core, and in the feed-forward part. A backward moves twice as much.
NORM_WIDTHS = 4  # before the projections
QUERY_WIDTHS = KEY_WIDTHS = 8  # token shift, norm of the heads, rotary
VALUE_WIDTHS = 4  # token shift alone
MIXER_WIDTHS = NORM_WIDTHS + QUERY_WIDTHS + KEY_WIDTHS + VALUE_WIDTHS
FEED_FORWARD_WIDTHS = 24
RECURRENCE_WIDTHS = 16  # what a recurrence's kernels read and write
BACKWARD_FACTOR = 2.0  # products of a backward over those of its forward
ATTENTION_BACKWARD_FACTOR = 2.5  # of fused attention, which forms the scores anew
SAMPLES = 64
PROJECTED_BEFORE = 0.75  # share of the projections that lies before the mixer's core: q, k, v of q, k, v, out

Kernels = dict[str, tuple[float, float, float]]  # kernel -> (bf16 operations, float32 operations, bytes)


@dataclass(frozen=True)
class Outside:
    """Seconds of what every kind of layer has beside the core of its mixer.

    project: all before the core, the finishing of its tensors included, which is what follows the products.
    """

    project: float
    finish_query: float
    finish_key: float
    finish_value: float
    output: float
    feed_forward: float
    loss: float  # head and loss, forward and backward, at the end of the forward

    @property
    def unfinished(self) -> float:
        """Of `project` up to the products of all tensors."""
        return self.project - (self.finish_query + self.finish_key + self.finish_value)


def outside(cluster: Cluster, model: ModelConfig, tokens: int) -> Outside:
    width = tokens * model.hidden_size * ELEMENT_BYTES
    kv_heads = model.kvm.key_value_heads(model) if "kvm" in model.layer_kinds else None
    projections = tokens * projection_flops(model, kv_heads) / cluster.matrix_flops
    feed_forward = tokens * 4 * model.hidden_size * model.ffn_width / cluster.matrix_flops
    head = tokens * 2 * model.hidden_size * model.vocab_size / cluster.matrix_flops
    return Outside(
        project=PROJECTED_BEFORE * projections + MIXER_WIDTHS * width / cluster.memory_bytes,
        finish_query=QUERY_WIDTHS * width / cluster.memory_bytes,
        finish_key=KEY_WIDTHS * width / cluster.memory_bytes,
        finish_value=VALUE_WIDTHS * width / cluster.memory_bytes,
        output=(1 - PROJECTED_BEFORE) * projections,
        feed_forward=feed_forward + FEED_FORWARD_WIDTHS * width / cluster.memory_bytes,
        loss=(1 + BACKWARD_FACTOR) * head,
    )


@dataclass(frozen=True)
class KVMWork:
    """Seconds of one layer's passes over a span."""

    route: float  # the serial part of the forward
    values: float
    attend: float
    window_backward: float
    state_backward: float
    share_out: float  # the serial part of the backward


def kvm_work(
    cluster: Cluster, model: ModelConfig, span: tuple[int, int], total: int, heads: int, groups: int = 1
) -> KVMWork:
    """Of `heads` query heads on [start, stop) of a sequence of `total` tokens; groups: hand-overs of heads.

    Heads that share keys and values share a state, which is routed, folded and walked once. Each reads it by
    itself: bytes of such reads are counted for each, more than kernels need to move.
    """
    states = heads * model.kvm.key_value_heads(model) / model.num_heads
    settings = kvm_settings(model)
    plan = _plan(settings, span, total)
    work = _kernels(settings, span, total, model.head_width)
    shape = Shape(model.head_width, ELEMENT_BYTES)
    filled = _filled(cluster, settings, plan, shape, states / groups)
    route = _seconds(cluster, work, states, "prepare_keys", "route", "fold") / filled
    walk = _seconds(cluster, work, states, "walk")
    return KVMWork(
        route=route + groups * route_launches(plan) * cluster.launch_seconds,
        values=_seconds(cluster, work, states, "fold") + groups * cluster.launch_seconds,
        attend=walk + _seconds(cluster, work, heads, "read"),
        window_backward=_seconds(cluster, work, heads, "read_backward_window"),
        state_backward=walk + _seconds(cluster, work, heads, "read_backward_queries", "read_backward_slots"),
        share_out=_seconds(cluster, work, states, "share_out", "prepare_keys_backward")
        + groups * 2 * cluster.launch_seconds,
    )


def kvm_settings(model: ModelConfig) -> KVMSettings:
    config = model.kvm
    return KVMSettings(config.budget, config.chunk, config.window_chunks, config.sinks)


def route_launches(plan: Plan) -> int:
    """Each waits for the one before: route, open slots where some do, fold."""
    return sum(1 if fold.is_first_state else 2 + (fold.appended > 0) for fold in plan.folds)


@lru_cache(maxsize=4096)
def _plan(settings: KVMSettings, span: tuple[int, int], total: int) -> Plan:
    start, stop = span
    return plan_call(settings, start, stop, ahead_at_start=start > 0, ahead_at_stop=stop < total)


@lru_cache(maxsize=4096)
def _kernels(settings: KVMSettings, span: tuple[int, int], total: int, width: int) -> Kernels:
    return kernel_work(_plan(settings, span, total), settings, width, ELEMENT_BYTES)


def _seconds(cluster: Cluster, work: Kernels, heads: float, *kernels: str) -> float:
    """Each kernel takes its arithmetic or its bytes, whichever is more."""
    total = 0.0
    for kernel in kernels:
        half, float32, size = work[kernel]
        arithmetic = half / cluster.kernel_flops + float32 / cluster.float32_flops
        total += heads * max(arithmetic, size / cluster.memory_bytes)
    return total


def _filled(cluster: Cluster, settings: KVMSettings, plan: Plan, shape: Shape, heads: float) -> float:
    """Share of the device that one launch of the routing kernel fills, as its own rule shares it out.

    At the mean of the slots that the folds meet. heads: of one sequence in a launch.
    """
    slots = [fold.slots_before for fold in plan.folds if not fold.is_first_state]
    if not slots:
        return 1.0
    target, rows = TARGETS[cluster.target], max(1, round(heads * cluster.sequences))
    programs = route_programs(target, shape, settings.chunk, rows, sum(slots) // len(slots))
    return min(1.0, programs / target.units)


def block_seconds(cluster: Cluster, model: ModelConfig, total: int) -> list[int]:
    """Nanoseconds of forward and backward of each block of KVM layers on one rank, for balanced shards.

    The mean over each of up to SAMPLES parts of the sequence stands for all blocks of the part.
    """
    chunk = model.kvm.chunk
    blocks = -(-total // chunk)
    stride = -(-blocks // SAMPLES)
    costs: list[int] = []
    for first in range(0, blocks, stride):
        count = min(stride, blocks - first)
        span = (first * chunk, (first + count) * chunk)
        work = kvm_work(cluster, model, span, total, model.num_heads)
        beside = outside(cluster, model, count * chunk)
        seconds = sum(vars(work).values()) - work.values
        seconds += (1 + BACKWARD_FACTOR) * (beside.project + beside.output + beside.feed_forward)
        seconds += beside.loss / model.num_layers
        costs += [round(1e9 * seconds / count)] * count
    return costs


def attention_seconds(cluster: Cluster, model: ModelConfig, tokens: int, ranks: int) -> float:
    """One rank's even share of causal attention over `tokens` tokens, forward; by large fused kernels."""
    flops = 2 * model.num_heads * model.head_width * tokens**2 / ranks
    return flops / cluster.matrix_flops


def recurrence_seconds(cluster: Cluster, model: ModelConfig, tokens: int) -> float:
    """A chunked linear recurrence with a state [D, D] per head, forward."""
    flops = tokens * 2 * 9 * model.hidden_size * model.rwkv7.head_dim
    size = RECURRENCE_WIDTHS * tokens * model.hidden_size * ELEMENT_BYTES
    return max(flops / cluster.kernel_flops, size / cluster.memory_bytes)
