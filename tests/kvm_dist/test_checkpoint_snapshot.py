"""The copy that a save is written from: whatever lies where, the same elements, in memory made once."""

import pytest
import torch
from torch import Tensor

from kvm_dist.checkpoint.snapshot import Snapshot, tensor_layouts
from parallel.engine.deepspeed import OwnedTensors


def owned(name: str, views: dict[str, Tensor]) -> OwnedTensors:
    return OwnedTensors(name, torch.float32, (1,), 0, views)


def flat(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size))


def test_copies_are_of_their_own_view_in_whatever_order_and_with_whatever_gaps() -> None:
    masters, moments, alone = flat(90), flat(91), flat(7)
    tensors = [
        owned("last", {"master": masters[60:90], "exp_avg": moments[60:90]}),
        owned("none", {}),
        owned("first", {"master": masters[:20], "exp_avg": moments[:20]}),
        owned("empty", {"master": masters[20:20], "exp_avg": torch.empty(0)}),
        owned("behind a gap", {"master": masters[25:60], "exp_avg": moments[20:55]}),
        owned("of a storage of its own", {"master": alone}),
    ]
    taken = Snapshot().take(tensors)
    wanted = [{kind: view.clone() for kind, view in one.views.items()} for one in tensors]
    for source in (masters, moments, alone):
        source.fill_(torch.nan)
    assert [one for one, _ in taken] == tensors
    for (_, copies), kinds in zip(taken, wanted, strict=True):
        assert copies.keys() == kinds.keys()
        assert all(torch.equal(copies[kind], kinds[kind]) for kind in kinds)


def test_what_lies_side_by_side_is_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    masters, moments = flat(1000), flat(1001)
    tensors = [
        owned(str(start), {"master": masters[start : start + 10], "exp_avg": moments[start : start + 10]})
        for start in range(0, 1000, 10)
    ]
    sizes: list[int] = []
    copy = Tensor.copy_

    def counted(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        sizes.append(source.numel())
        return copy(self, source, non_blocking)

    monkeypatch.setattr(Tensor, "copy_", counted)
    Snapshot().take(tensors)
    assert sizes == [1000, 1000]


def test_a_rank_that_owns_nothing_copies_nothing() -> None:
    nothing = [owned("elsewhere", {})]
    assert Snapshot().take(nothing) == [(nothing[0], {})]


def test_memory_is_made_once() -> None:
    tensors = [owned("weight", {"master": flat(30)})]
    snapshot = Snapshot()
    snapshot.reserve(tensors)
    places = set()
    for _ in range(3):
        ((_, copies),) = snapshot.take(tensors)
        places.add(copies["master"].data_ptr())
    assert len(places) == 1


def test_the_files_of_a_model_are_of_about_one_size() -> None:
    model = [
        OwnedTensors(str(i), torch.float32, (1 << 20, 8), 0, {}) for i in range(64)
    ]  # 6 GiB with moments
    layouts = tensor_layouts(model)
    assert len(layouts) == 18
    assert max(layout.size for layout in layouts) < (400 << 20)
