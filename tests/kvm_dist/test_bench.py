"""The bench's arithmetic, its files, and that it measures what it says. Never how long anything takes."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from kvm_dist.bench.contenders import (
    forward,
    grad_output,
    make_inputs,
    pieces_error,
    state_bytes,
    time_decoding,
    time_training,
)
from kvm_dist.bench.kvm import bench_kvm
from kvm_dist.bench.memory import peak_bytes
from kvm_dist.bench.results import Decoding, Goal, Results, Timing
from kvm_dist.bench.setting import BUDGETS, FULL_ATTENTION, REFERENCE, Setting
from kvm_dist.plots.bench import time_against_length

FIXED, POWER = BUDGETS
TINY = Setting(
    lengths=(600, 1_100),
    heads=2,
    width=16,
    rotary_dims=8,
    threads=1,
    repeats=1,
    longest_reference=600,
    decode_context=600,
    memory_length=600,
)


def made_up() -> Results:
    """Full attention takes 4, 6, 5 and 64 seconds where KVM takes 1, 2, 1 and 8."""
    results = Results(Setting(lengths=(8_192, 32_768)), {"load_average_start": 0.0, "load_average_end": 0.0})
    results.timings = [
        Timing(FIXED, 8_192, (0.25, 0.5, 0.25), (0.75, 1.5, 0.75)),
        Timing(FULL_ATTENTION, 8_192, (1.0, 2.0, 2.0), (3.0, 4.0, 3.0)),
        Timing(FIXED, 32_768, (2.0,), (6.0,)),
        Timing(FULL_ATTENTION, 32_768, (16.0,), (64.0,)),
    ]
    results.decodings = [
        Decoding(FIXED, 32_768, (0.1, 0.1, 0.4), 8),
        Decoding(FULL_ATTENTION, 32_768, (1.0, 1.0, 1.6), 80),
    ]
    results.peak_bytes = {POWER: 700_000_000}
    return results


def test_a_speedup_is_the_median_of_the_ratios_of_each_round() -> None:
    assert made_up().speedup(FIXED, 8_192) == 4.0  # of 4/1, 6/2 and 5/1
    assert made_up().speedup(FIXED, 32_768) == 10.0
    assert made_up().speedup(POWER, 8_192) is None


def test_an_exponent_is_the_growth_per_doubling_between_the_ends() -> None:
    assert made_up().exponent(FIXED) == pytest.approx(1.5)  # 8 times in two doublings
    assert made_up().exponent(FULL_ATTENTION) == pytest.approx(2.0)
    assert made_up().exponent(POWER) is None


def test_decoding_is_compared_by_the_mean_which_counts_the_token_that_folds_a_chunk() -> None:
    assert made_up().decode_speedup(FIXED) == pytest.approx(6.0)


def test_goals_are_judged_in_their_own_direction_and_only_where_they_were_measured() -> None:
    assert Goal("", wanted=2, got=3, at_least=True).met
    assert not Goal("", wanted=2, got=3, at_least=False).met
    met = {goal.name: goal.met for goal in made_up().goals()}
    assert met == {
        f"{FIXED}: times faster at 8,192": True,
        f"{FIXED}: times faster at 32,768": False,
        f"{POWER}: GB above inputs and outputs": False,
        f"{FIXED}: decode, times faster at 32K": False,
    }


def test_full_attention_reads_the_same_tensors_in_the_same_layout() -> None:
    inputs = make_inputs(TINY, 40)
    got = forward(TINY, FULL_ATTENTION, inputs)
    q, k, v = (inputs[name].transpose(1, 2) for name in ("q", "k", "v"))
    scores = (q @ k.transpose(2, 3) * TINY.width**-0.5).masked_fill(
        torch.ones(40, 40).triu(1) > 0, -torch.inf
    )
    torch.testing.assert_close(got, (scores.softmax(-1) @ v).transpose(1, 2))
    # within the first two chunks KVM is plain causal attention
    torch.testing.assert_close(forward(TINY, FIXED, inputs), got)


def test_contenders_of_kvm_are_the_two_budgets_and_the_definition() -> None:
    inputs = make_inputs(TINY, 900)
    power, reference = (forward(TINY, name, inputs) for name in (POWER, REFERENCE))
    torch.testing.assert_close(power, reference)
    assert not torch.allclose(power, forward(TINY, FIXED, inputs))


def test_everybody_takes_the_same_number_of_turns_in_turn() -> None:
    turns: list[str] = []
    setting = replace(TINY, repeats=2)
    timings = time_training(setting, 600, turns.append)
    order = [FIXED, POWER, FULL_ATTENTION, REFERENCE]
    assert turns == order * 3
    assert [one.contender for one in timings] == order
    assert all(len(one.forward) == len(one.backward) == 3 for one in timings)


def test_decoding_goes_on_from_the_context_and_counts_its_cache() -> None:
    found = {one.contender: one for one in time_decoding(TINY)}
    assert list(found) == [FIXED, POWER, FULL_ATTENTION]
    assert len(found[FIXED].seconds) == TINY.chunk
    per_token = TINY.heads * TINY.width * 2 * 4
    assert found[FULL_ATTENTION].cache_bytes == TINY.decode_context * per_token
    assert found[FIXED].cache_bytes < found[POWER].cache_bytes


def test_a_states_bytes_are_those_of_its_tensors() -> None:
    inputs = make_inputs(TINY, 600)
    arguments = {"budget": BUDGETS[FIXED], "chunk": TINY.chunk, "return_state": True}
    from models.kvm import kvm_attention

    _, state = kvm_attention(**inputs, **arguments)  # type: ignore[arg-type]
    assert state is not None
    slots, window = 256, 600 - 256
    assert state_bytes(state) == 4 * TINY.heads * (slots * (2 * TINY.width + 1) + window * 2 * TINY.width)


def test_pieces_equal_one_prefill() -> None:
    assert pieces_error(TINY, 1_100) < 1e-5


def test_memory_is_measured_above_what_a_caller_holds_anyway() -> None:
    """Every buffer the operator makes grows with the tokens of the call; the peak must show it."""
    setting = replace(TINY, heads=8, width=64, memory_length=16_384)
    undo_log = 2 * (16_384 - 512) * 8 * 64 * 4
    assert peak_bytes(setting, FIXED) > undo_log / 2


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_a_bench_measures_everything_tells_how_far_it_is_and_leaves_the_threads_alone(tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    results = bench_kvm(replace(TINY, threads=2), lambda what, done: told.append((what, done)))
    assert torch.get_num_threads() == 1
    shares = [done for _, done in told]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)
    assert set(results.peak_bytes) == {FIXED, POWER, FULL_ATTENTION}
    written = json.loads(json.dumps(results.as_json()))
    assert set(written["speedup"]) == {FIXED, POWER, REFERENCE}
    assert set(written["speedup"][FIXED]) == {"600", "1100"}
    assert written["speedup"][FIXED]["600"] == pytest.approx(results.speedup(FIXED, 600))
    picture = time_against_length(results, tmp_path / "bench.png")
    assert Image.open(picture).size == (1600, 1000)


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"lengths": ()}, "lengths"), ({"threads": 0}, "threads"), ({"repeats": 0}, "repeats")],
)
def test_settings_that_measure_nothing_are_refused(changed: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(TINY, **changed)  # type: ignore[arg-type]


def test_gradients_flow_to_every_input_of_a_contender() -> None:
    inputs, grad = make_inputs(TINY, 900), grad_output(TINY, 900)
    forward(TINY, POWER, inputs).backward(grad)
    assert all(tensor.grad is not None and tensor.grad.abs().sum() > 0 for tensor in inputs.values())
