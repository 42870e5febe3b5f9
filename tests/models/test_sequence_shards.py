"""Shards of a model's sequence: whole blocks of nearly the same modelled cost, the same everywhere."""

import subprocess
import sys

import pytest

from models.budget import FixedBudget, PowerLawBudget
from models.config import KVMConfig, ModelConfig
from models.costs import block_flops, model_costs
from models.sequence_shards import sequence_shards, shards_problem
from tests.models.tiny import HYBRID, tiny_config

MILLION = 2**20


def growing(kvm: KVMConfig = KVMConfig()) -> ModelConfig:  # noqa: B008
    return ModelConfig(layers=["kvm"], kvm=kvm)


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_the_ranks_of_a_long_sequence_cost_nearly_the_same(ranks: int) -> None:
    shards = sequence_shards(growing(), MILLION, ranks)
    block = max(block_flops(growing(), MILLION // 256, 256))
    assert max(shards.flops) - min(shards.flops) <= 2 * block
    lengths = list(shards.rank_tokens)
    assert lengths == sorted(lengths, reverse=True)
    assert sum(lengths) == MILLION
    assert all(start % 256 == 0 for start, _ in shards.spans)


def test_balance_takes_the_waiting_away_that_equal_shards_leave() -> None:
    equal = sequence_shards(growing(), MILLION, 8, balanced=False)
    assert len(set(equal.rank_tokens)) == 1
    assert equal.imbalance > 0.25
    assert sequence_shards(growing(), MILLION, 8).imbalance < 0.005


def test_what_grows_may_cost_more_than_its_flops_and_nothing_else_does() -> None:
    plain, dear = (sequence_shards(growing(), MILLION, 8, growth_cost=cost) for cost in (1.0, 3.0))
    assert dear.rank_tokens[0] > plain.rank_tokens[0]
    assert dear.rank_tokens[-1] < plain.rank_tokens[-1]
    assert dear.imbalance < 0.005
    flat = ModelConfig(layers=["sliding_window"])
    assert sequence_shards(flat, 32_768, 8, growth_cost=3.0).spans == sequence_shards(flat, 32_768, 8).spans


def test_a_state_that_does_not_grow_is_cut_into_equal_shards() -> None:
    model = growing(kvm=KVMConfig(budget=FixedBudget(slots=256)))
    lengths = sequence_shards(model, MILLION, 8).rank_tokens
    assert max(lengths) - min(lengths) <= 2 * 256


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_length_of_no_whole_blocks_is_padded_at_its_end(ranks: int) -> None:
    shards = sequence_shards(tiny_config(HYBRID), 1001, ranks)
    assert shards.padded_tokens == 1024
    assert sum(shards.rank_tokens) == 1001
    assert shards.spans[0][0] == 0
    assert all(before[1] == after[0] for before, after in zip(shards.spans, shards.spans[1:], strict=False))
    assert all(start % 32 == 0 for start, _ in shards.spans)


def test_the_longest_number_of_ranks_is_one_block_each_and_one_more_is_refused() -> None:
    model = tiny_config(["kvm"])
    assert sequence_shards(model, 33, 3).spans == ((0, 16), (16, 32), (32, 48))
    problem = shards_problem(model, 33, 4)
    assert problem is not None
    assert "parallel.sequence=3 or less, or data.sequence_length=49 or more" in problem
    assert shards_problem(model, 49, 4) is None
    with pytest.raises(ValueError, match=r"data\.sequence_length=33 is too short"):
        sequence_shards(model, 33, 4)


def test_the_blocks_together_cost_what_the_model_costs() -> None:
    for layers in (["kvm", "rwkv7"], ["full_attention"], HYBRID):
        model = tiny_config(layers)
        blocks = sum(block_flops(model, 8192 // 32, 32))
        assert blocks == pytest.approx(8192 * model_costs(model, 8192).mean_token_flops, rel=0.01)


def test_a_long_sequence_is_counted_in_part() -> None:
    model = tiny_config(["kvm"], kvm=KVMConfig(chunk=16, budget=PowerLawBudget(minimum=16)))
    costs = block_flops(model, 10_001, 16)
    assert len(costs) == 10_001
    assert len(set(costs)) <= 2048
    assert costs == sorted(costs)


def test_ranks_of_a_node_have_the_same_number_of_tokens_to_a_few() -> None:
    shards = sequence_shards(growing(), 131_000, 32, node_ranks=4)
    for first in range(0, 32, 4):
        lengths = [stop - start for start, stop in shards.spans[first : first + 4]]
        assert max(lengths) - min(lengths) <= 8
        assert sum(lengths) % 256 == 0
    assert shards.padded_tokens == 131_072
    assert min(shards.rank_tokens) > 0
    assert sum(shards.flops) == sum(block_flops(growing(), 512, 256, 32))


def test_ranks_of_a_node_keep_to_the_blocks_of_other_kinds() -> None:
    shards = sequence_shards(tiny_config(["kvm", "block_window"]), 400, 4, node_ranks=2)
    assert all(start % 8 == 0 for start, _ in shards.spans)
    assert any(start % 16 for start, _ in shards.spans)
    assert all(
        start % 32 == 0 for start, _ in sequence_shards(tiny_config(HYBRID), 999, 4, node_ranks=2).spans
    )


def test_shards_need_no_torch() -> None:
    code = "import sys, models.sequence_shards; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
