"""Random state of one rank as plain tensors: Python, NumPy, torch on the CPU and on the device."""

import hashlib
import random
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from kvm_dist.checkpoint.layout import TensorSpec
from kvm_dist.checkpoint.parts import Piece


def capture_rng(device: torch.device) -> dict[str, Tensor]:
    """Everything a rank draws from. A missing cached Gaussian is an empty tensor."""
    _, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position], dtype=torch.int64),  # type: ignore[union-attr]
        "numpy_gauss": torch.tensor([cached] if has_gauss else [], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore_rng(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Puts a captured state back. Call it last, just before the first step: set-up code draws numbers too."""
    gauss = state["python_gauss"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), gauss[0] if gauss else None))
    *keys, position = state["numpy"].tolist()
    cached = state["numpy_gauss"].tolist()
    words = np.array(keys, dtype=np.uint32)
    np.random.set_state(("MT19937", words, position, len(cached), cached[0] if cached else 0.0))
    torch.set_rng_state(state["torch"])
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)


def seed_rng(seed: int, rank: int, step: int, device: torch.device) -> None:
    """Seeds every generator of a rank that has no saved state; streams of ranks and of steps differ."""
    digest = hashlib.sha256(f"{seed} {rank} {step}".encode()).digest()
    random.seed(digest)
    np.random.seed(np.frombuffer(digest, dtype=np.uint32))
    number = int.from_bytes(digest[:7], "little")
    torch.default_generator.manual_seed(number)
    if device.type != "cpu":
        with torch.get_device_module(device).device(device):
            torch.get_device_module(device).manual_seed(number)


def rng_contents(states: Sequence[Mapping[str, Tensor]]) -> tuple[list[TensorSpec], list[Piece]]:
    """The random states of all ranks, in rank order, as tensors of a checkpoint."""
    named = {
        f"rank-{rank:05d}.{kind}": tensor
        for rank, state in enumerate(states)
        for kind, tensor in state.items()
    }
    specs = [TensorSpec(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in named.items()]
    return specs, [Piece(key, 0, tensor) for key, tensor in named.items()]
