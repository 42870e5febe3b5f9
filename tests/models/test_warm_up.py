"""Warming up compiles all that training launches, and changes nothing else."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from models.budget import FixedBudget, PowerLawBudget, SaturatingBudget
from models.config import KVMConfig
from models.kvm.kernels.launch import Launch, recorded_launches
from models.kvm.kernels.tuning import TARGETS
from models.loss import token_losses
from models.warm_up import warm_up
from parallel.mesh import Mesh
from parallel.sequence.context import SequenceContext, WholeSequence
from parallel.sequence.ranks import RankedSequence
from tests.models.tiny import HYBRID, tiny_batch, tiny_config, tiny_model
from tests.support.logical_ranks import QueueExchange, run_logical_ranks

CPU = torch.device("cpu")
TARGET = TARGETS["sm_90"]


def built(launches: list[Launch]) -> set[tuple[object, ...]]:
    """What makes Triton build a kernel anew."""
    return {
        (
            one.kernel.__name__,
            tuple(z.dtype if isinstance(z, torch.Tensor) else type(z) for z in one.arguments),
            *sorted(one.constants.items()),
            one.tile,
        )
        for one in launches
    }


def step(kvm: KVMConfig, tokens: int, start: int, context: SequenceContext) -> set[tuple[object, ...]]:
    """What a rank of a training run launches in one step."""
    model = tiny_model(HYBRID, kvm=kvm)
    ids, labels = (z[:, start : start + tokens] for z in tiny_batch(start + tokens))
    with recorded_launches(TARGET) as launches:
        token_losses(model(ids, context), labels)[0].backward()
    return built(launches)


SETTINGS = [
    {"budget": PowerLawBudget(factor=3, minimum=16, round_down=8)},  # appends at some folds
    {"budget": FixedBudget(slots=16)},
    {"budget": PowerLawBudget(factor=3, minimum=16), "max_slots": 56},  # appends for long, then no more
    {"budget": SaturatingBudget(limit=48, minimum=16)},
    {"window_chunks": 3, "kv_heads": 1, "gate_appends": True},
    {"window_chunks": 1, "merge_gate": False, "head_temperatures": False, "value_radius": False},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_step_launches_nothing_that_was_not_compiled_before(settings: dict[str, object]) -> None:
    kvm = KVMConfig(chunk=16, backend="triton", **settings)  # type: ignore[arg-type]
    with recorded_launches(TARGET) as launches:
        warm_up(tiny_config(HYBRID, kvm=kvm), CPU, torch.float32)
    compiled, shard = built(launches), 160

    def on_rank(rank: int, exchange: QueueExchange) -> set[tuple[object, ...]]:
        mesh = cast(Mesh, SimpleNamespace(sequence_rank=rank))
        return step(kvm, shard, rank * shard, RankedSequence(mesh, rank * shard, exchange))

    launched = step(kvm, 500, 0, WholeSequence())
    for of_rank in run_logical_ranks(3, on_rank):
        launched |= of_rank
    assert len(launched) >= 15
    assert launched <= compiled, sorted(str(one) for one in launched - compiled)


@pytest.mark.parametrize("kind", tiny_config(HYBRID).known_kinds())
def test_every_kind_warms_up_and_draws_no_random_number(kind: str) -> None:
    before, said = torch.get_rng_state(), list[str]()
    warm_up(tiny_config([kind, "kvm", kind]), CPU, torch.bfloat16, said.append)
    assert torch.equal(torch.get_rng_state(), before)
    assert [line.split(":")[0] for line in said] == list(dict.fromkeys([kind, "kvm"]))


@pytest.mark.parametrize(
    ("rocm", "switched_off", "remedies"),
    [(None, False, 2), ("7.0", False, 3), ("7.0", True, 2)],
)
def test_a_refusal_of_the_compiler_names_the_kind_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, rocm: str | None, switched_off: bool, remedies: int
) -> None:
    pytest.importorskip("triton")

    def refused(*_: object) -> None:
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr("models.warm_up._step", refused)
    monkeypatch.setattr(torch.version, "hip", rocm)
    monkeypatch.delenv("AMDGCN_USE_BUFFER_OPS", raising=False)
    if switched_off:
        monkeypatch.setenv("AMDGCN_USE_BUFFER_OPS", "0")
    with pytest.raises(ValueError, match=r"kernels of gla layers do not compile .*PassManager") as raised:
        warm_up(tiny_config(["gla"]), torch.device("cuda"), torch.bfloat16)
    assert "model.gla.backend=torch" in str(raised.value)
    assert ("AMDGCN_USE_BUFFER_OPS=0" in str(raised.value)) == (remedies == 3)
    with pytest.raises(RuntimeError, match="PassManager"):
        warm_up(tiny_config(["gla"]), CPU, torch.bfloat16)
