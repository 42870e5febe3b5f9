"""The life of the slots of one sequence: who opened them, who merged into them, who reads them."""

import torch
from torch import Tensor

from models.kvm.inspection import BlockRead, Folded

NOTHING_YET = -1


class SlotLives:
    """Follows the folds and reads of a sequence in order. [J, m] with J key-value heads."""

    def __init__(self) -> None:
        empty = torch.empty(0, 0, dtype=torch.long)
        self.opened_by = empty  # position of the token that opened the slot
        self.last_written = empty  # position of the last token that entered it
        self.tokens = empty  # tokens that are in it

    def fold(self, folded: Folded) -> None:
        heads, slots = folded.route.shape[1], folded.fold.slots_after
        slot = folded.slot.T.cpu()  # [J, c]
        positions = torch.arange(folded.fold.start, folded.fold.stop).expand_as(slot)
        self.opened_by, self.last_written = (
            _grown(held, heads, slots, NOTHING_YET) for held in (self.opened_by, self.last_written)
        )
        opened = torch.where(folded.opened.T.cpu(), positions, NOTHING_YET)
        self.opened_by.scatter_reduce_(1, slot, opened, "amax")
        self.last_written.scatter_reduce_(1, slot, positions, "amax")
        self.tokens = _grown(self.tokens, heads, slots, 0).scatter_add_(1, slot, torch.ones_like(slot))

    def ages(self, read: BlockRead, sinks: int) -> tuple[Tensor, Tensor]:
        """[H] how long before the block's end the slots it reads were opened, and were last written: means
        over what is read of the slots that are no sinks; NaN where nothing is."""
        mass = read.by_slot[:, sinks:].double().cpu()
        slots = slice(sinks, read.block.slots)
        return (
            _weighted_age(mass, self.opened_by[:, slots], read.block.stop),
            _weighted_age(mass, self.last_written[:, slots], read.block.stop),
        )


def slots_in_use(read: BlockRead, sinks: int, share: float = 0.9) -> Tensor:
    """[H] the fewest slots, no sinks, that hold `share` of what a block reads of all such slots."""
    mass = read.by_slot[:, sinks:].double().cpu().sort(dim=-1, descending=True).values
    held = mass.cumsum(dim=-1)
    return (held < share * held[:, -1:]).sum(dim=-1).clamp(max=mass.shape[1] - 1) + 1


def _weighted_age(mass: Tensor, positions: Tensor, now: int) -> Tensor:
    """[H] of mass [H, m] and positions [J, m]."""
    ages = (now - positions).double().repeat_interleave(len(mass) // len(positions), dim=0)
    return (mass * ages).sum(dim=-1) / mass.sum(dim=-1)


def _grown(held: Tensor, heads: int, slots: int, fill: int) -> Tensor:
    grown = torch.full((heads, slots), fill, dtype=torch.long)
    if held.numel():
        grown[:, : held.shape[1]] = held
    return grown
