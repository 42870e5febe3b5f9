"""What keeps `torch.compile` out of the operator."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

REASON = "KVM walks its chunks in Python, fills buffers in place and exchanges state with neighbour ranks"


def opaque_to_compiler(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, run as it is inside compiled code.

    Tracing it would unroll every chunk of a sequence. The compiler is not imported for this: that takes
    longer than importing all the models, and most processes never compile.
    """

    kept: list[Callable[P, R]] = []

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not kept:
            kept.append(torch.compiler.disable(function, reason=REASON))
        return kept[0](*args, **kwargs)

    return called
