"""Rows of a padded batch, read without their padding and grouped by length."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.backbone import Backbone
from models.cache import CachedSequence
from parallel.sequence.context import WholeSequence


@dataclass
class RowGroup:
    """Rows whose tokens so far are equally many: one grid of chunks and one state budget fit them all."""

    rows: list[int]  # their places in the batch
    context: CachedSequence | WholeSequence
    last: Tensor | None = None  # [g, 1, d] features of each row's last token; None before the first

    def select(self, places: Sequence[int], rows: list[int]) -> "RowGroup":
        """The group's members at `places`, in any order and number, as `rows` of a batch."""
        if list(places) == list(range(len(self.rows))):
            return RowGroup(rows, self.context, self.last)
        index = torch.tensor(places)
        context = self.context.select(index) if isinstance(self.context, CachedSequence) else self.context
        last = None if self.last is None else self.last.index_select(0, index.to(self.last.device))
        return RowGroup(rows, context, last)


def split_by_tokens(groups: Iterable[RowGroup], tokens: Sequence[int]) -> list[RowGroup]:
    """The groups divided where their rows go on by different numbers of tokens; tokens: one number a row."""
    divided = []
    for group in groups:
        places: dict[int, list[int]] = {}
        for place, row in enumerate(group.rows):
            places.setdefault(tokens[row], []).append(place)
        divided += [group.select(found, [group.rows[place] for place in found]) for found in places.values()]
    return divided


def read_rows(
    backbone: Backbone, input_ids: Tensor, present: Tensor | None, groups: Sequence[RowGroup]
) -> Tensor:
    """Features [B, T, d] of input_ids [B, T]; caches of the groups move past what their rows hold.

    present: [B, T] bool, False where a row holds no token; None where all do. Features there are those of the
    last token before, of this call or an earlier one, and 0 if there is none. The groups hold every row once,
    and rows of one group have equally many tokens.
    """
    parts = [_read_group(backbone, input_ids, present, group) for group in groups]
    order = torch.tensor([row for group in groups for row in group.rows])
    if len(parts) == 1 and torch.equal(order, torch.arange(len(order))):
        return parts[0]
    return torch.cat(parts).index_select(0, order.argsort().to(input_ids.device))


def _read_group(backbone: Backbone, input_ids: Tensor, present: Tensor | None, group: RowGroup) -> Tensor:
    rows = torch.tensor(group.rows, device=input_ids.device)
    ids = input_ids.index_select(0, rows)
    if present is None:
        return _read_tokens(backbone, ids, group)
    held = present.index_select(0, rows)
    ids = ids[held].view(len(rows), -1)
    before = group.last
    if before is None:
        weight = backbone.head.weight
        before = weight.new_zeros(len(rows), 1, weight.shape[1])
    features = before
    if ids.shape[1]:
        features = torch.cat([before, _read_tokens(backbone, ids, group)], dim=1)
    source = held.cumsum(dim=1).unsqueeze(-1)  # 0: what was before this call
    return features.gather(1, source.expand(-1, -1, features.shape[-1]))


def _read_tokens(backbone: Backbone, ids: Tensor, group: RowGroup) -> Tensor:
    features = backbone.features(ids, group.context)
    if isinstance(group.context, CachedSequence):
        group.context.advance(ids.shape[1])
        group.last = features[:, -1:].clone()
    return features
