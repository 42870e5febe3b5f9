"""Several query heads on one head of keys, values and state: as if those were repeated, without repeating."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from models.kvm import KVMState
from parallel.sequence.context import HeadSplit
from tests.models.kvm.cases import PARAMETERS, Case, assert_close, random_case, state_tensors
from tests.models.kvm.test_compile import assert_compiled_gives_the_same_bits, calling
from tests.models.kvm.test_nodes import assert_bitwise_equal_to_one_rank as assert_nodes_equal
from tests.models.kvm.test_nodes import run_nodes
from tests.models.kvm.test_ranks import assert_bitwise_equal_to_one_rank, run_shards

REPEATED = {"k": 2, "v": 2, "merge_gate": 2, "state_temperature": 0, "window_temperature": 0}  # head axes

SWITCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one head for all": {"heads": 1, "group": 6},
    "gated appends, a long window": {"gate_appends": True, "window_chunks": 3, "batch": 1},
    "no radius, no window before the chunk": {"value_radius": False, "window_chunks": 1},
    "no gate, no temperatures, no sinks": {"gate": False, "temperatures": False, "sinks": 0},
}


def grouped_case(tokens: int, **settings: Any) -> Case:
    return random_case(tokens, **{"batch": 2, "heads": 2, "group": 3, **settings})


def repeated(case: Case) -> Case:
    """The same call with a head of keys, values, gate and state for every query head."""
    q, k = case.inputs["q"], case.inputs["k"]
    assert q is not None
    assert k is not None
    group = q.shape[2] // k.shape[2]
    heads = {name: case.inputs[name] for name in REPEATED}
    return case.with_inputs(
        **{
            name: None if one is None else one.repeat_interleave(group, dim=REPEATED[name])
            for name, one in heads.items()
        }
    )


def summed_over_groups(gradients: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of repeated heads as those of the heads."""
    found = {}
    for name, gradient in gradients.items():
        axis = REPEATED.get(name)
        if axis is not None:
            gradient = gradient.unflatten(axis, (wanted[name].shape[axis], -1)).sum(dim=axis + 1)
        found[name] = gradient
    return found


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("switch", SWITCHES)
def test_a_group_reads_what_it_would_read_of_repeated_heads(switch: str, backend: str) -> None:
    case = grouped_case(50, dtype=torch.float64, **SWITCHES[switch])
    one, each = case.run(backend), repeated(case).run(backend)
    assert_close({"output": one.output}, {"output": each.output}, 1e-12)
    assert_close(summed_over_groups(each.gradients, one.gradients), one.gradients, 1e-9)
    group = each.state.keys.shape[1] // one.state.keys.shape[1]
    assert_close({"keys": one.state.keys}, {"keys": each.state.keys[:, ::group]}, 1e-12)
    assert one.state.window_keys.shape[2] == one.state.keys.shape[1]


@pytest.mark.parametrize("tokens", [1, 4, 5, 8, 9, 61])
def test_backends_agree_at_every_edge(tokens: int) -> None:
    case = grouped_case(tokens, dtype=torch.float64)
    wanted, got = case.run("reference"), case.run("torch")
    assert_close({"output": got.output}, {"output": wanted.output}, 1e-9)
    assert_close(state_tensors(got.state), state_tensors(wanted.state), 1e-9)
    assert_close(got.gradients, wanted.gradients, 1e-9)


def test_gradients_equal_finite_differences() -> None:
    case = random_case(14, heads=1, group=2, width=4, dtype=torch.float64, seed=1)
    leaves = case.leaves()

    def outputs(*tensors: Tensor) -> tuple[Tensor, ...]:
        output, state = case.call(dict(zip(leaves, tensors, strict=True)), backend="torch", return_state=True)
        assert state is not None
        return output, state.keys, state.values

    assert torch.autograd.gradcheck(outputs, tuple(leaves.values()), eps=1e-7, atol=1e-5)


def test_keys_values_and_states_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of as many heads as the queries have is made of them."""
    case = random_case(200, heads=2, group=8, width=16, chunk=16)
    made: list[int] = []
    original = torch.Tensor.repeat_interleave

    def counted(tensor: Tensor, *arguments: Any, **more: Any) -> Tensor:
        made.append(tensor.numel())
        return original(tensor, *arguments, **more)

    monkeypatch.setattr(torch.Tensor, "repeat_interleave", counted)
    seen: list[tuple[int, int]] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "flash_attention" in str(func):
                q, k = (args[1], args[2]) if "backward" in str(func) else args[:2]
                seen.append((q.shape[1], k.shape[1]))
            return func(*args, **(kwargs or {}))

    with Watch():
        case.run("torch")
    assert not made
    assert seen
    assert set(seen) == {(2, 2)}


@pytest.mark.parametrize("lengths", [[32, 29], [16, 12, 24, 9]])
@pytest.mark.parametrize("settings", [{}, {"window_chunks": 3, "gate_appends": True}])
def test_shards_give_the_bits_of_one_rank(lengths: list[int], settings: dict[str, Any]) -> None:
    assert_bitwise_equal_to_one_rank(grouped_case(sum(lengths), **settings), lengths)


def test_groups_of_heads_that_have_states_are_handed_over_with_the_bits_of_one_rank() -> None:
    case = grouped_case(77, heads=3, group=2)
    assert_bitwise_equal_to_one_rank(case, [16, 4, 40, 17], head_split=HeadSplit(2))
    with pytest.raises(ValueError, match="4 groups of 3 heads"):
        run_shards(case, [40, 37], head_split=HeadSplit(4))


@pytest.mark.parametrize(("size", "groups"), [(2, 1), (4, 2)])
def test_nodes_split_the_heads_that_have_states(size: int, groups: int) -> None:
    case = grouped_case(69, heads=5, group=2)
    parts, _ = run_nodes(case, [16, 24, 8, 21], size, groups)
    assert_nodes_equal(case, parts)


def test_bytes_sent_shrink_by_the_group() -> None:
    def sent(case: Case) -> list[tuple[str, str, int]]:
        return [one for exchange in run_shards(case, [16, 24])[1] for one in exchange.sent]

    few, many = sent(grouped_case(40)), sent(repeated(grouped_case(40)))
    assert [(way, name, 3 * size) for way, name, size in few] == many

    def sent_to_peers(case: Case) -> list[tuple[int, str, int]]:
        return [one for peers in run_nodes(case, [16, 12, 8, 5], 2)[1] for one in peers.sent]

    ours, theirs = sent_to_peers(grouped_case(41)), sent_to_peers(repeated(grouped_case(41)))
    assert [(to, name, 3 * size) for to, name, size in ours] == theirs


@pytest.mark.parametrize("prompt", [0, 21])
@pytest.mark.parametrize("settings", [{}, {"temperatures": False, "value_radius": False, "gate": False}])
def test_tokens_one_by_one_give_the_outputs_and_state_of_one_call(
    settings: dict[str, Any], prompt: int
) -> None:
    case = grouped_case(41, dtype=torch.float64, **settings)
    whole, leaves = case.run("reference"), case.leaves()
    state: KVMState | None = None
    outputs = []
    with torch.no_grad():
        for start, stop in pairwise([0, *range(max(prompt, 1), 42)]):
            piece = {name: one if name in PARAMETERS else one[:, start:stop] for name, one in leaves.items()}
            output, state = case.call(piece, backend="torch", state=state, return_state=True)
            outputs.append(output)
    assert state is not None
    assert_close({"output": torch.cat(outputs, dim=1)}, {"output": whole.output}, 1e-9)
    assert_close(state_tensors(state), state_tensors(whole.state), 1e-9)


def test_a_grouped_call_is_one_graph_with_the_bits_of_eager_code() -> None:
    torch.compiler.reset()
    case = grouped_case(61)
    assert_compiled_gives_the_same_bits(calling(case), case)
    leaves = case.leaves()
    tensors = [leaves[name] for name in ("q", "k", "v", "merge_gate", *PARAMETERS)]
    settings = ("saturating", [16, 1, 1], [4, 2, 1, 2, -1], [True, False, True], "torch")
    torch.library.opcheck(torch.ops.kvm_dist.attention.default, (*tensors, *settings))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"k": 4}, r"k has shape \[2, 12, 4, 8\]: want a number of heads that divides the 6 of q"),
        ({"v": 3}, r"v has shape \[2, 12, 3, 8\]: want \[2, 12, 2, 8\] beside q .* and k"),
        ({"merge_gate": 6}, r"merge_gate has shape \[2, 12, 6\]: want \[2, 12, 2\]"),
        ({"state_temperature": 6}, r"state_temperature has shape \[6\]: want \[2\]"),
    ],
)
def test_heads_that_do_not_fit_are_refused_by_name(changed: dict[str, int], named: str) -> None:
    case = grouped_case(12)
    leaves = case.leaves()
    for name, heads in changed.items():
        shape = list(leaves[name].shape)
        shape[REPEATED[name]] = heads
        leaves[name] = torch.ones(shape)
    with pytest.raises(ValueError, match=named):
        case.call(leaves)


def test_a_state_of_other_heads_is_refused() -> None:
    case = grouped_case(30)
    _, state = case.call(case.leaves(), return_state=True)
    other = repeated(case)
    with pytest.raises(ValueError, match=r"state.keys has shape \[2, 2, .*want \[2, 6, "):
        other.call(other.leaves(), state=state)
