"""Which backend runs a call."""

from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from models.kvm.kernels.tuning import LONGEST_CHUNK, WIDEST_HEAD
from models.kvm.layout import KVMSettings
from parallel.sequence.context import Exchange

Backend = Literal["auto", "reference", "torch", "triton"]


def choose_backend(
    backend: str, exchange: Exchange, q: Tensor, settings: KVMSettings
) -> Literal["reference", "torch", "triton"]:
    if backend == "reference":
        if exchange.has_previous or exchange.has_next:
            raise ValueError(
                "backend='reference' does not run on a shard of a sequence; use 'auto' or 'torch'"
            )
        return "reference"
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"backend={backend!r}: want 'auto', 'reference', 'torch' or 'triton'")
    if backend == "triton" and not _has_triton():
        raise ValueError("backend='triton': Triton is not installed; install it, or use 'auto' or 'torch'")
    if backend == "auto":
        in_kernels = (
            q.dtype != torch.float64 and q.shape[3] <= WIDEST_HEAD and settings.chunk <= LONGEST_CHUNK
        )
        return "triton" if q.is_cuda and in_kernels and _has_triton() else "torch"
    return "torch" if backend == "torch" else "triton"


@cache
def _has_triton() -> bool:
    """Looked for once: it would cost as much as decoding a token."""
    return find_spec("triton") is not None
