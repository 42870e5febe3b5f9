"""`torch.compile` takes the operator as it is: one graph, and the bits of eager code."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from models.budget import FixedBudget, SaturatingBudget, SlotBudget
from models.kvm import KVMState
from parallel.sequence.context import WholeSequence
from tests.models.kvm.cases import PARAMETERS, PER_TOKEN, Case, gradients, random_case
from tests.models.tiny import tiny_batch, tiny_model

Function = Callable[[dict[str, Tensor]], Tensor]


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def output_and_gradients(function: Function, case: Case, **wanted: bool) -> dict[str, Tensor]:
    """wanted: whether an input wants a gradient (all others do)."""
    leaves = case.leaves()
    for name, leaf in leaves.items():
        leaf.requires_grad_(wanted.get(name, True))
    output = function(leaves)
    output.backward(case.grad_output)
    return {"output": output.detach(), **gradients(leaves)}


def assert_compiled_gives_the_same_bits(function: Function, case: Case, **wanted: bool) -> None:
    eager = output_and_gradients(function, case, **wanted)
    compiled: Function = torch.compile(function, fullgraph=True, backend="aot_eager")
    for name, tensor in output_and_gradients(compiled, case, **wanted).items():
        assert torch.equal(tensor, eager[name]), name


def calling(case: Case) -> Function:
    return lambda leaves: 1.5 * case.call(leaves)[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_slots": 7, "gate_appends": True, "gate_first_state": True, "dtype": torch.float64},
        {"budget": FixedBudget(slots=9), "gate": False, "value_radius": False, "sinks": 0},
        {"budget": SaturatingBudget(limit=16), "temperatures": False, "window_chunks": 3, "heads": 3},
    ],
)
def test_a_call_is_one_graph_with_the_bits_of_eager_code(settings: dict[str, Any]) -> None:
    case = random_case(61, batch=2, **settings)
    assert_compiled_gives_the_same_bits(calling(case), case)


def test_the_generated_code_of_inductor_gives_the_same_bits() -> None:
    if shutil.which("g++") is None:
        pytest.skip("inductor wants a C++ compiler")
    case = random_case(30)
    function: Function = lambda leaves: case.call(leaves)[0]  # noqa: E731
    wanted = output_and_gradients(function, case)
    for name, tensor in output_and_gradients(torch.compile(function, fullgraph=True), case).items():
        assert torch.equal(tensor, wanted[name]), name


def test_sequences_of_any_length_share_one_graph() -> None:
    graphs = 0

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        nonlocal graphs
        graphs += 1
        return graph

    function = calling(random_case(4))
    compiled = torch.compile(function, fullgraph=True, backend=count, dynamic=True)
    for tokens in (61, 40, 8, 3, 100):
        case = random_case(tokens, batch=2)
        wanted = output_and_gradients(function, case)
        for name, tensor in output_and_gradients(compiled, case).items():
            assert torch.equal(tensor, wanted[name]), f"{name} of {tokens} tokens"
    assert graphs == 1


def test_a_call_that_is_made_twice_in_a_graph_gets_both_gradients() -> None:
    case, other = random_case(37), random_case(37, seed=1).leaves()
    both: Function = lambda leaves: case.call(leaves)[0] + case.call({**leaves, "q": other["q"]})[0]  # noqa: E731
    assert_compiled_gives_the_same_bits(both, case)


def test_only_the_gradients_asked_for_are_returned_by_a_graph() -> None:
    case = random_case(30)
    wanted = {"q": False, "merge_gate": False, "key_norm_weight": False}
    assert_compiled_gives_the_same_bits(calling(case), case, **wanted)


def test_a_checkpointed_call_in_a_graph_gives_the_same_bits() -> None:
    case = random_case(37)

    def recomputed(leaves: dict[str, Tensor]) -> Tensor:
        def call(k: Tensor) -> Tensor:
            return case.call({**leaves, "k": 2 * k})[0]

        output: Tensor = checkpoint(call, leaves["k"], use_reentrant=False)
        return output

    assert_compiled_gives_the_same_bits(recomputed, case)


def test_autocast_around_a_graph_changes_no_bit() -> None:
    case = random_case(60)
    wanted = output_and_gradients(calling(case), case)
    compiled: Function = torch.compile(calling(case), fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = output_and_gradients(compiled, case)
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor), name


class UnknownBudget(SlotBudget):
    def slots_at(self, context_tokens: int) -> int:
        return 4 + context_tokens // 5


@pytest.mark.parametrize(
    "more", [{"backend": "reference"}, {"budget": UnknownBudget()}, {"return_state": True}]
)
def test_calls_that_are_no_operator_break_the_graph_and_are_right(more: dict[str, Any]) -> None:
    case = random_case(30)
    function: Function = lambda leaves: 1.5 * case.call(leaves, **more)[0]  # noqa: E731
    wanted = output_and_gradients(function, case)
    for name, tensor in output_and_gradients(torch.compile(function, backend="aot_eager"), case).items():
        assert torch.equal(tensor, wanted[name]), name


def test_compiled_calls_go_on_from_a_state() -> None:
    case = random_case(30)
    whole, wanted = case.call(case.leaves(), return_state=True)

    @torch.compile(backend="aot_eager")
    def call(leaves: dict[str, Tensor], state: KVMState | None) -> tuple[Tensor, KVMState | None]:
        return case.call(leaves, state=state, return_state=True)

    first, state = call(case.leaves(0, 13), None)
    second, state = call(case.leaves(13, 30), state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole)
    assert state is not None
    assert wanted is not None
    torch.testing.assert_close(state.keys, wanted.keys)


@pytest.mark.parametrize("left_out", [(), ("merge_gate", "state_temperature", "window_temperature")])
def test_the_operator_keeps_the_rules_of_operators(left_out: tuple[str, ...]) -> None:
    """Its schema, its fake implementation, its autograd and its tracing with symbolic shapes."""
    leaves: dict[str, Any] = {**random_case(30).leaves(), **dict.fromkeys(left_out)}
    tensors = [leaves[name] for name in (*PER_TOKEN, *PARAMETERS)]
    settings = ("saturating", [16, 1, 1], [4, 2, 1, 2, -1], [True, False, True], "torch")
    torch.library.opcheck(torch.ops.kvm_dist.attention.default, (*tensors, *settings))


def test_what_does_not_fit_is_refused_by_name_in_a_graph_too() -> None:
    case = random_case(12)
    compiled = torch.compile(lambda leaves: case.call(leaves)[0], fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="state_temperature has shape"):
        compiled({**case.leaves(), "state_temperature": torch.ones(8)})


@pytest.mark.parametrize(
    ("layers", "recompute"), [(["kvm", "rwkv7"], False), (["kvm", "kvm"], True)], ids=str
)
def test_a_compiled_model_of_two_layers_is_one_graph_with_the_bits_of_an_eager_one(
    layers: list[str], recompute: bool
) -> None:
    model = tiny_model(layers, activation_checkpointing=recompute)
    ids, _ = tiny_batch(tokens=75)

    def step(one: Callable[..., Tensor]) -> dict[str, Tensor]:
        model.zero_grad()
        logits = one(ids, WholeSequence())
        logits.square().mean().backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return {"logits": logits.detach(), **grads}

    eager = step(model)
    compiled = step(torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert compiled.keys() == eager.keys()
    for name, tensor in eager.items():
        assert torch.equal(compiled[name], tensor), name


def test_importing_the_operator_imports_no_compiler() -> None:
    code = "import sys, models.kvm; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
