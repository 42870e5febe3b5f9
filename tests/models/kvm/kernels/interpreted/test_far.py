"""Offsets past 2**31 elements: every launch of a call again, at the end of tensors that long.

They are sparse files, of which only the last pages are touched.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.kvm import FixedBudget
from models.kvm.kernels import launch as starting
from models.kvm.kernels.jit.read_backward import delta_kernel
from models.kvm.kernels.launch import Launch, recorded_launches
from models.kvm.kernels.tuning import TARGETS
from tests.models.kvm.cases import random_case
from tests.models.kvm.kernels.interpreted.exact import rounded

TOKENS, WIDTH, C = 70, 16, 16
BEFORE = 2**31 // WIDTH  # tokens, so that each batch entry has more than 2**31 elements
MOVED_COLUMNS = {"p_folds": [0], "p_blocks": [0, 1, 2]}
MOVED_NUMBERS = {
    "tokens": BEFORE,
    "queries": BEFORE,
    "begin": BEFORE,
    "end": BEFORE,
    "first_chunk": BEFORE // C,
}


def recorded() -> list[Launch]:
    """The launches of a call and its backward, in order, none run."""
    settings: dict[str, Any] = {"width": WIDTH, "chunk": C, "budget": FixedBudget(slots=36), "batch": 2}
    case = rounded(random_case(TOKENS, heads=1, gate_appends=True, **settings), torch.float16)
    with recorded_launches(TARGETS["interpreter"]) as launches:
        output, _ = case.call(case.leaves(), backend="triton")
        output.backward(case.grad_output)
    return launches


def is_per_token(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == TOKENS


def moved(one: Launch, folder: Path) -> Launch:
    """The launch on copies, those of tokens behind `BEFORE` others."""
    return replace(one, arguments=tuple(_moved(one, folder)))


def _moved(one: Launch, folder: Path) -> Iterator[Any]:
    for name, value in zip(one.kernel.arg_names, one.arguments, strict=False):
        if is_per_token(value):
            shape = (value.shape[0], BEFORE + TOKENS, *value.shape[2:])
            file = folder / name
            far = torch.from_file(str(file), shared=True, size=prod(shape), dtype=value.dtype).view(shape)
            file.unlink()
            far[:, BEFORE:] = value
            yield far
        elif isinstance(value, Tensor):
            whole = value if value._base is None else value._base
            copy = whole.detach().clone().as_strided(value.shape, value.stride(), value.storage_offset())
            for column in MOVED_COLUMNS.get(name, ()):
                copy[:, column] += BEFORE
            yield copy
        else:
            yield value + MOVED_NUMBERS.get(name, 0)


def assert_equal(one: Launch, far: Launch) -> None:
    for name, near, other in zip(one.kernel.arg_names, one.arguments, far.arguments, strict=False):
        if isinstance(near, Tensor) and name not in MOVED_COLUMNS:
            got = other[:, BEFORE:] if is_per_token(near) else other
            assert torch.equal(got.nan_to_num(), near.nan_to_num()), f"{one.kernel.__name__}: {name}"


def start(one: Launch) -> None:
    starting.launch(one.kernel, one.grid, one.arguments, one.tile, one.target, **one.constants)


def test_every_kernel_finds_tokens_behind_two_to_the_31_elements(tmp_path: Path) -> None:
    """But for delta, whose programs begin at the first token."""
    tried, launches = set(), recorded()
    with torch.no_grad():
        for one in launches:
            can_move = any(map(is_per_token, one.arguments)) and one.kernel is not delta_kernel
            far = moved(one, tmp_path) if can_move else None
            start(one)
            if far is not None:
                start(far)
                assert_equal(one, far)
                tried.add(one.kernel.__name__.removesuffix("_kernel"))
    assert tried == {
        "append",
        "fold_keys",
        "prepare_keys",
        "prepare_keys_backward",
        "read",
        "read_backward_queries",
        "read_backward_slots",
        "read_backward_window",
        "share_out",
        "walk",
    }
