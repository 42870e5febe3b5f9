"""Random operator calls, and how two backends are compared on them."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from models.kvm import KVMState, PowerLawBudget, kvm_attention

PER_TOKEN = ("q", "k", "v", "merge_gate")
PARAMETERS = ("key_norm_weight", "key_norm_bias", "state_temperature", "window_temperature")


@dataclass
class Case:
    """Inputs by argument name (None where left out), settings, and the output's gradient."""

    inputs: dict[str, Tensor | None]
    settings: dict[str, Any]
    grad_output: Tensor

    @property
    def tokens(self) -> int:
        return self.grad_output.shape[1]

    def leaves(self, start: int = 0, stop: int | None = None) -> dict[str, Tensor]:
        """Fresh leaves of the inputs, tokens [start, stop)."""
        return {
            name: (tensor[:, start:stop] if name in PER_TOKEN else tensor).clone().requires_grad_()
            for name, tensor in self.inputs.items()
            if tensor is not None
        }

    def call(self, leaves: dict[str, Tensor], **more: Any) -> tuple[Tensor, KVMState | None]:
        arguments: dict[str, Any] = {"merge_gate": None, **leaves, **self.settings, **more}
        return kvm_attention(**arguments)

    def run(self, backend: str, **more: Any) -> "Result":
        leaves = self.leaves()
        output, state = self.call(leaves, backend=backend, return_state=True, **more)
        output.backward(self.grad_output)
        assert state is not None
        return Result(output.detach(), state, gradients(leaves))

    def with_inputs(self, **changed: Tensor | None) -> "Case":
        return replace(self, inputs={**self.inputs, **changed})


@dataclass
class Result:
    output: Tensor
    state: KVMState
    gradients: dict[str, Tensor] = field(default_factory=dict)


def random_case(
    tokens: int,
    *,
    batch: int = 1,
    heads: int = 2,
    group: int = 1,
    width: int = 8,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    gate: bool = True,
    temperatures: bool = True,
    **settings: Any,
) -> Case:
    """Chunks of 4 tokens and about 2 * sqrt(tokens) slots, unless the settings say otherwise.

    group: query heads that read each of the `heads`.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    def positive(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=dtype) + 0.5

    per_token = (batch, tokens, heads, width)
    of_queries = (batch, tokens, heads * group, width)
    inputs = {
        "q": normal(*of_queries),
        "k": normal(*per_token),
        "v": normal(*per_token),
        "merge_gate": positive(*per_token[:3]) if gate else None,
        "key_norm_weight": positive(width),
        "key_norm_bias": normal(width) * 0.1,
        "state_temperature": positive(heads) if temperatures else None,
        "window_temperature": positive(heads) if temperatures else None,
    }
    chunk = settings.pop("chunk", 4)
    defaults = {"budget": PowerLawBudget(factor=2, minimum=chunk), "chunk": chunk, "rotary_dims": 2}
    return Case(inputs, {**defaults, **settings}, normal(*of_queries))


def gradients(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of every leaf; zeros where none arrived."""
    return {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}


def state_tensors(state: KVMState) -> dict[str, Tensor]:
    names = ("keys", "values", "radii", "counts", "window_keys", "window_values", "window_gate")
    return {name: getattr(state, name) for name in names if getattr(state, name) is not None}


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    """Every tensor within `tolerance` of the largest entry wanted."""
    assert got.keys() == wanted.keys()
    for name in wanted:
        assert got[name].shape == wanted[name].shape, name
        assert not got[name].isnan().any(), name
        scale = wanted[name].abs().max().item() if wanted[name].numel() else 1.0
        error = (got[name] - wanted[name]).abs().max().item() if wanted[name].numel() else 0.0
        assert error <= tolerance * max(scale, 1e-3), f"{name}: {error:.2e} of {scale:.2e}"
