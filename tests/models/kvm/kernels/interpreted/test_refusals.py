import pytest
import torch

from models.kvm import FixedBudget
from tests.models.kvm.cases import random_case
from tests.models.kvm.kernels.interpreted.exact import rounded


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"dtype": torch.float64}, "torch.float64"),
        ({"dtype": torch.bfloat16}, "interpreter multiplies bfloat16 wrongly"),
        ({"width": 257}, "head width 257"),
        ({"chunk": 513, "budget": FixedBudget(slots=513)}, "chunk 513"),
        ({"batch": 2**15, "heads": 2}, "batch times heads 65536"),
    ],
)
def test_what_kernels_cannot_do_is_refused_by_name(settings: dict[str, object], named: str) -> None:
    case = random_case(3, **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=named):
        case.call(case.leaves(), backend="triton")


def test_the_interpreter_is_never_given_bfloat16() -> None:
    with pytest.raises(ValueError, match="bfloat16"):
        rounded(random_case(3), torch.bfloat16)
