"""The KVM operator: Key-Value Means attention (arXiv 2605.09877)."""

from models.budget import Budget, FixedBudget, PowerLawBudget, SaturatingBudget, SlotBudget
from models.kvm.ops import kvm_attention
from models.kvm.state import KVMState

__all__ = [
    "Budget",
    "FixedBudget",
    "KVMState",
    "PowerLawBudget",
    "SaturatingBudget",
    "SlotBudget",
    "kvm_attention",
]
