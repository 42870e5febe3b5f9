"""The published operator vectors: inputs, outputs, gradients and final states of the authors' code."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from models.kvm import FixedBudget, KVMState, PowerLawBudget, SaturatingBudget, SlotBudget, kvm_attention

FOLDER = Path(__file__).parents[2] / "golden"
NAMES = sorted(path.stem for path in FOLDER.glob("op_*.safetensors"))
BUDGETS: dict[str, type[SlotBudget]] = {
    "fixed": FixedBudget,
    "power_law": PowerLawBudget,
    "saturating": SaturatingBudget,
}


@dataclass
class Case:
    inputs: dict[str, Any]  # leaves, [B, T, H, .], by argument name of kvm_attention
    gradients: dict[str, Tensor]
    settings: dict[str, Any]
    output: Tensor
    grad_output: Tensor
    final_state: dict[str, Tensor]

    def run(self, backend: str) -> tuple[Tensor, KVMState]:
        arguments: dict[str, Any] = {**self.inputs, **self.settings, "backend": backend, "return_state": True}
        output, state = kvm_attention(**arguments)
        assert state is not None
        return output, state


def load(name: str) -> Case:
    with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    arguments = {"state_key_norm_weight": "key_norm_weight", "state_key_norm_bias": "key_norm_bias"}
    names = ["q", "k", "v", "merge_gate", *arguments, "state_temperature", "window_temperature"]
    flags = json.loads(metadata["flags"])
    if not flags.pop("kvm_use_head_temps", 1):
        names = names[:-2]
    inputs: dict[str, Any] = {}
    gradients = {}
    for key in names:
        inputs[arguments.get(key, key)] = _tokens_first(tensors[key]).requires_grad_()
        gradients[arguments.get(key, key)] = _tokens_first(tensors[f"grad_{key}"])
    budget = json.loads(metadata["budget"])
    settings = {
        key: int(metadata[key]) for key in ("chunk", "window_chunks", "sinks", "rotary_dims", "max_slots")
    }
    settings["gate_appends"] = bool(flags.pop("kvm_apply_merge_gate_to_appends", 0))
    assert not flags, f"{name}: unread switches {flags}"
    return Case(
        inputs,
        gradients,
        {**settings, "budget": BUDGETS[budget["kind"]](**budget)},
        tensors["output"],
        tensors["grad_output"],
        {
            "keys": tensors["final_state_keys"],
            "values": tensors["final_state_values"],
            "radii": tensors["final_state_radii"].squeeze(-1),
        },
    )


def _tokens_first(tensor: Tensor) -> Tensor:
    """[B, H, T, D] to [B, T, H, D], and a gate [B, H, T, 1] to [B, T, H]."""
    if tensor.dim() < 4:
        return tensor.clone()
    tensor = tensor.transpose(1, 2)
    return (tensor.squeeze(-1) if tensor.shape[-1] == 1 else tensor).contiguous()


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest entry wanted."""
    return ((got - wanted).abs().max() / wanted.abs().max().clamp_min(torch.finfo(wanted.dtype).tiny)).item()
