"""What `generate` carries from token to token: a cache for every group of equally long rows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from models.cache import CachedSequence
from models.hf.rows import RowGroup, split_by_tokens


class KVMDistCache(Cache):
    """Per layer what its kind keeps: slots and a window, a recurrent state, the last tokens, or all of them.

    Each row counts its own tokens, padding left out. A state cannot forget tokens again: `crop` is refused.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.groups: list[RowGroup] = []
        self._columns = 0

    def groups_for(self, tokens: Sequence[int]) -> list[RowGroup]:
        """The groups, still the cache's own, for a call in which row b goes on by tokens[b]."""
        if not self.groups:
            self.groups = [RowGroup(list(range(len(tokens))), CachedSequence())]
        if self.batch_size != len(tokens):
            raise ValueError(
                f"the cache holds {self.batch_size} rows, got {len(tokens)}; start with a new cache, or "
                "change its rows with batch_repeat_interleave or batch_select_indices"
            )
        self.groups = split_by_tokens(self.groups, tokens)
        return self.groups

    def advance(self, columns: int) -> None:
        """Count the columns of a call, padding included: what the length of `input_ids` grew by."""
        self._columns += columns

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of `input_ids` that were read, padding included."""
        return self._columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in older releases

    @property
    def nbytes(self) -> int:
        """Bytes held, all layers and rows together."""
        return sum(group.context.nbytes for group in self.groups if isinstance(group.context, CachedSequence))

    @property
    def batch_size(self) -> int:
        return sum(len(group.rows) for group in self.groups)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b becomes what row beam_idx[b] was."""
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Row b becomes what row indices[b] was; a mask of the rows to keep is understood too."""
        chosen = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self._select(chosen.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, one after the other."""
        self._select([row for row in range(self.batch_size) for _ in range(repeats)])

    def reset(self) -> None:
        self.groups, self._columns = [], 0

    def crop(self, *arguments: Any, **named: Any) -> None:
        raise ValueError(
            "this cache cannot be cropped: a state of merged tokens cannot forget; decode greedily, by "
            "sampling or by beams, without an assistant, and go back by starting again from a shorter prompt"
        )

    def update(self, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        raise ValueError("this cache is filled by KVMDistForCausalLM alone; pass it to no other model")

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return bool(self.groups)

    @property
    def is_linear(self) -> list[bool]:
        """One entry that says that tokens are counted: transformers then never reads a prompt twice."""
        return [False]

    @property
    def is_sliding(self) -> list[bool]:
        return [False]

    def __repr__(self) -> str:
        tokens = {group.context.start: len(group.rows) for group in self.groups}
        return f"KVMDistCache(rows by tokens: {tokens}, {self.nbytes} bytes)"

    def _select(self, sources: list[int]) -> None:
        """Row b becomes what row sources[b] was."""
        groups = []
        for group in self.groups:
            place = {row: number for number, row in enumerate(group.rows)}
            rows = [row for row, source in enumerate(sources) if source in place]
            if rows:
                groups.append(group.select([place[sources[row]] for row in rows], rows))
        self.groups = groups
