"""The least time that an accelerator's peak rates allow, for one layer and for full attention."""

from dataclasses import dataclass

import torch

from kvm_dist.bench.one_layer import WINDOW_CHUNKS, Shape
from models.budget import SlotBudget
from models.kvm.layout import KVMSettings, slots_covering, tokens_covered


@dataclass(frozen=True)
class Peak:
    """Dense 16-bit matrix FLOPs a second and bytes a second."""

    flops: float
    bandwidth: float


PEAKS = {"H200": Peak(989e12, 4.8e12), "H100": Peak(989e12, 3.35e12), "MI325X": Peak(1307e12, 6.0e12)}


def peak_of(device: torch.device) -> Peak | None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for key, peak in PEAKS.items() if key in name), None)


def kvm_floor(phase: str, tokens: int, budget: SlotBudget, shape: Shape, peak: Peak) -> float:
    """Least seconds by arithmetic and by bytes; a backward takes 2.5 times the reads of a forward."""
    settings = KVMSettings(budget, shape.chunk, WINDOW_CHUNKS, 1, 0, None, False, False, True)
    size = torch.finfo(shape.dtype).bits // 8
    per_head = shape.batch * shape.heads * shape.head_dim
    if phase.startswith("decode"):
        slots = slots_covering(settings, tokens_covered(settings, tokens))
        return per_head * (2 * 4 * slots + 2 * size * WINDOW_CHUNKS * shape.chunk) / peak.bandwidth
    ends = range(shape.chunk, tokens + 1, shape.chunk)
    slots_by_chunk = [slots_covering(settings, tokens_covered(settings, end)) for end in ends]
    window = min(tokens, WINDOW_CHUNKS * shape.chunk - shape.chunk // 2)
    reads = 4 * per_head * shape.chunk * sum(m + window for m in slots_by_chunk)
    routing = 2 * per_head * shape.chunk * sum(slots_by_chunk)
    flops = reads + routing if phase == "prefill" else 2.5 * reads
    return max(flops / peak.flops, _io_bytes(phase, per_head * tokens * size) / peak.bandwidth)


def full_floor(phase: str, tokens: int, shape: Shape, peak: Peak) -> float:
    size = torch.finfo(shape.dtype).bits // 8
    per_head = shape.batch * shape.heads * shape.head_dim
    if phase.startswith("decode"):
        return 2 * size * per_head * tokens / peak.bandwidth
    flops = 2 * per_head * tokens**2 * (1 if phase == "prefill" else 2.5)
    return max(flops / peak.flops, _io_bytes(phase, per_head * tokens * size) / peak.bandwidth)


def _io_bytes(phase: str, tensor_bytes: float) -> float:
    """q, k, v in and out out; a backward also reads the output's gradient and writes three."""
    return tensor_bytes * (4 if phase == "prefill" else 8)
