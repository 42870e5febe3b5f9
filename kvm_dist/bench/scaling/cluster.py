"""Constants of the devices that steps are extrapolated to, and where each comes from. Imports no torch.

Peak rates are those of models/kvm/kernels/roofline.py, from the vendors' data sheets. Fractions, launch and
latencies are assumptions: the bench shows what halving and doubling each of them does.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from models.kvm.kernels.roofline import DEVICES


@dataclass(frozen=True)
class Cluster:
    """Nodes of `node_ranks` devices. Rates a second; links per device and direction, in bytes a second."""

    name: str
    matrix_flops: float  # bf16 products, as reached by matrix multiplications
    kernel_flops: float  # bf16 products, as reached by the KVM and recurrence kernels
    float32_flops: float  # float32 products, as reached by the routing kernel
    memory_bytes: float
    launch_seconds: float
    target: str  # of models/kvm/kernels/tuning.py: what a launch of the routing kernel fills
    node_bytes: float  # to one other device of the node
    node_total_bytes: float  # to all of them together
    node_latency: float
    network_bytes: float  # to a device of another node
    network_latency: float
    node_ranks: int = 8
    sequences: int = 1  # of a micro-batch

    def between(self, source: int, to: int) -> tuple[float, float]:
        """Bytes a second and latency between two ranks."""
        if source // self.node_ranks == to // self.node_ranks:
            return self.node_bytes, self.node_latency
        return self.network_bytes, self.network_latency

    def copy_seconds(self, size: float) -> float:
        """Of packing or unpacking: read and written once."""
        return 2 * size / self.memory_bytes

    def sender_seconds(self, source: int, to: int, size: int) -> float:
        return self.copy_seconds(size)  # packing

    receiver_seconds = sender_seconds  # unpacking

    def wire_seconds(self, source: int, to: int, size: int) -> float:
        return size / self.between(source, to)[0]

    def latency_seconds(self, source: int, to: int) -> float:
        return self.between(source, to)[1]

    def all_to_all_seconds(self, ranks: int, size: float) -> float:
        """Ranks 0, 1, ... give each other their shares of `size` bytes, all at once."""
        if ranks == 1:
            return 0.0
        inside = min(self.node_ranks, ranks)
        within = size * (inside - 1) / ranks / self.node_total_bytes + self.node_latency
        if ranks == inside:
            return within
        outside = size * (ranks - inside) / ranks / self.network_bytes + self.network_latency
        return max(within, outside)

    def ring_seconds(self, ranks: int, size: float) -> float:
        """Everybody's message to the next rank of a ring, which is as fast as its slowest link."""
        rate, latency = self.between(0, self.node_ranks if ranks > self.node_ranks else 1)
        return size / rate + latency

    def with_sequences(self, count: int) -> "Cluster":
        """As one sequence of `count` in a micro-batch sees it: launches, latencies and the filling of the
        device are shared by all of them."""
        return replace(
            self,
            launch_seconds=self.launch_seconds / count,
            node_latency=self.node_latency / count,
            network_latency=self.network_latency / count,
            sequences=count,
        )


# Of the peak: large bf16 matrix products on these devices reach 0.6 to 0.75; the paper's own KVM kernels
# reach 0.21 to 0.46 (arXiv 2605.09877, section 5); streaming kernels reach 0.7 to 0.9 of the bandwidth.
MATRIX_FRACTION, KERNEL_FRACTION, MEMORY_FRACTION = 0.6, 0.3, 0.7
LAUNCH_SECONDS = 5e-6  # between two dependent kernels of one stream; assumed
NODE_LATENCY, NETWORK_LATENCY = 10e-6, 20e-6  # a point-to-point call of NCCL or RCCL; assumed
NETWORK_BYTES = 400e9 / 8  # one 400 Gbit/s port per device, as in vendors' reference nodes


def _cluster(device: str, target: str, node_bytes: float, node_total_bytes: float) -> Cluster:
    peak = DEVICES[device]
    return Cluster(
        name=device,
        matrix_flops=MATRIX_FRACTION * peak.half_flops,
        kernel_flops=KERNEL_FRACTION * peak.half_flops,
        float32_flops=KERNEL_FRACTION * peak.float32_flops,
        memory_bytes=MEMORY_FRACTION * peak.bandwidth,
        launch_seconds=LAUNCH_SECONDS,
        target=target,
        node_bytes=node_bytes,
        node_total_bytes=node_total_bytes,
        node_latency=NODE_LATENCY,
        network_bytes=NETWORK_BYTES,
        network_latency=NETWORK_LATENCY,
    )


CLUSTERS = {
    # H200 data sheet: NVLink 900 GB/s in both directions together, through a switch.
    "H200": _cluster("H200", "sm_90", 450e9, 450e9),
    # MI325X data sheet: 7 Infinity Fabric links of 128 GB/s in both directions together,
    # one to each other device of the node.
    "MI325X": _cluster("MI325X", "gfx942", 64e9, 7 * 64e9),
}

ASSUMED = {
    "matrix_flops": "matrix products",
    "kernel_flops": "KVM kernels, bf16",
    "float32_flops": "routing kernel, float32",
    "memory_bytes": "memory bandwidth",
    "launch_seconds": "launch",
    "node_bytes": "link inside a node",
    "node_latency": "latency inside a node",
    "network_bytes": "link between nodes",
    "network_latency": "latency between nodes",
}


def variations(cluster: Cluster) -> Iterator[tuple[str, float, Cluster]]:
    """The cluster with one constant halved or doubled: (constant, factor, cluster)."""
    for constant in ASSUMED:
        together = ("node_bytes", "node_total_bytes") if constant == "node_bytes" else (constant,)
        for factor in (0.5, 2.0):
            changed = {name: factor * getattr(cluster, name) for name in together}
            yield constant, factor, replace(cluster, **changed)
