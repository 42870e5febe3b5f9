"""The plan's numbers are those of the run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvm_dist.config import RunConfig
from kvm_dist.load import load_config
from kvm_dist.plan import make_plan
from models.backbone import Backbone

CONFIGS = Path(__file__).parents[2] / "configs"


def config(*overrides: str, path: Path = CONFIGS / "quickstart.yaml") -> RunConfig:
    return load_config(path, overrides).config


@pytest.mark.parametrize(
    "layers",
    ["[kvm, rwkv7]", "[sliding_window, full_attention]", "[gated_deltanet, kda, mamba2, deltanet, gla]"],
)
def test_parameters_are_those_of_the_model(layers: str) -> None:
    made = config(f"model.layers={layers}", "parallel.sequence=1")
    plan = make_plan(made)
    model = Backbone(made.model)
    assert plan.parameters == sum(parameter.numel() for parameter in model.parameters())
    outside = plan.embedding_parameters + plan.head_parameters + 4 * made.model.hidden_size
    assert sum(plan.parameters_by_kind.values()) == plan.parameters - outside
    for layer, block in zip(plan.layers, model.layers, strict=True):
        assert layer.parameters == sum(parameter.numel() for parameter in block.parameters())


def test_the_sizes_of_the_paper_have_the_parameters_of_the_paper() -> None:
    for size, once, both in (("120M", 123.6e6, 162e6), ("350M", 353.5e6, 405e6)):
        plan = make_plan(config(path=CONFIGS / f"prolong/{size}/kvm-sqrt.yaml"))
        assert plan.parameters == pytest.approx(both, rel=0.01)
        assert plan.parameters - plan.embedding_parameters == pytest.approx(once, rel=0.01)


@pytest.mark.parametrize("size", ["120M", "350M"])
def test_every_family_has_about_the_parameters_of_its_size(size: str) -> None:
    """Those of the attention kinds within 1 %, recurrences with low-rank gates within 5 %."""
    once = {"120M": 123.6e6, "350M": 353.5e6}[size]
    families = [path for path in sorted(CONFIGS.glob(f"prolong/{size}/*.yaml")) if path.stem != "base"]
    assert len(families) >= 15
    for path in families:
        made = config(path=path)
        plan = make_plan(made)
        allowed = 0.05 if {"rwkv7", "kda"} & set(made.model.layer_kinds) else 0.01
        assert plan.parameters - plan.embedding_parameters == pytest.approx(once, rel=allowed), path.stem


def test_tokens_and_duration_follow_from_batch_length_and_steps() -> None:
    plan = make_plan(config(path=CONFIGS / "prolong/120M/kvm-256.yaml"), tokens_per_second=1e6)
    assert plan.tokens_per_step == 524_288
    assert plan.tokens == 524_288 * 6000
    assert plan.eta_seconds == pytest.approx(3145.728)
    assert plan.train_flops == pytest.approx(plan.train_flops_per_token * plan.tokens)
    assert make_plan(config()).eta_seconds is None


def test_a_training_token_costs_three_forwards_and_one_more_when_activations_are_recomputed() -> None:
    plain = make_plan(config())
    recomputed = make_plan(config("model.activation_checkpointing=true"))
    assert recomputed.train_flops_per_token == pytest.approx(plain.train_flops_per_token * 4 / 3)
    assert recomputed.memory.activations < plain.memory.activations


def test_there_is_one_hand_over_less_than_sequence_ranks_and_it_grows_with_a_growing_state() -> None:
    plan = make_plan(config("parallel.sequence=4", "model.kvm.budget.factor=16"))
    kvm, rwkv7 = plan.layers[2], plan.layers[3]
    assert (kvm.kind, rwkv7.kind) == ("kvm", "rwkv7")
    assert len(kvm.boundary_bytes) == len(rwkv7.boundary_bytes) == 3
    assert list(kvm.boundary_bytes) == sorted(set(kvm.boundary_bytes))
    assert len(set(rwkv7.boundary_bytes)) == 1
    assert make_plan(config("parallel.sequence=1")).layers[0].boundary_bytes == ()


def test_only_the_first_layer_of_a_kind_hands_over_its_first_value() -> None:
    layers = make_plan(config("model.num_layers=6")).layers
    first, second, third = (layer.boundary_bytes[0] for layer in layers if layer.kind == "rwkv7")
    sequences, width, element_bytes = 2, 128, 4
    assert first - second == sequences * width * element_bytes
    assert second == third


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_each_zero_stage_shares_one_more_thing(precision: str) -> None:
    base = [
        "parallel.data=4",
        "train.batch_sequences=8",
        "parallel.sequence=2",
        f"parallel.precision={precision}",
    ]
    plans = [make_plan(config(*base, f"parallel.zero_stage={stage}")) for stage in (1, 2, 3)]
    alone = make_plan(config("parallel.sequence=1", f"parallel.precision={precision}"))
    count, ranks = alone.parameters, 8
    width = 2 if precision == "bfloat16" else 4
    assert alone.memory.weights == width * count
    assert alone.memory.masters_and_moments == 12 * count
    for plan in plans:
        assert plan.memory.masters_and_moments == 12 * count // ranks
    assert [plan.memory.gradients for plan in plans] == [4 * count, 4 * count // ranks, 4 * count // ranks]
    assert [plan.memory.weights for plan in plans] == [width * count, width * count, width * count // ranks]


def test_stage_0_keeps_no_masters_beside_its_float32_weights() -> None:
    plan = make_plan(config("parallel.zero_stage=0"))
    assert plan.memory.masters_and_moments == 8 * plan.parameters


def test_more_ranks_leave_fewer_tokens_and_activations_to_each() -> None:
    one, two = (make_plan(config(f"parallel.sequence={ranks}", "parallel.shards=equal")) for ranks in (1, 2))
    assert (one.tokens_per_rank, two.tokens_per_rank) == (4096, 2048)
    assert two.memory.activations * 2 == one.memory.activations


def test_the_plan_tells_each_rank_s_share_and_how_long_others_wait_for_the_dearest() -> None:
    balanced, equal = (
        make_plan(config("parallel.sequence=4", "data.sequence_length=65537", f"parallel.shards={way}"))
        for way in ("balanced", "equal")
    )
    for plan in (balanced, equal):
        assert sum(shard.tokens for shard in plan.shards) == 65537
        assert sum(shard.cost for shard in plan.shards) == pytest.approx(1)
        assert max(shard.cost for shard in plan.shards) * 4 - 1 == pytest.approx(plan.imbalance)
        assert plan.padded_tokens == 63
    assert balanced.imbalance < 0.01 < 0.1 < equal.imbalance
    assert balanced.shards[0].tokens > balanced.shards[3].tokens
    assert balanced.tokens_per_rank == 2 * balanced.shards[0].tokens


def test_the_fullest_rank_is_the_one_whose_memory_is_told() -> None:
    plan = make_plan(config("parallel.sequence=4", "data.sequence_length=65536"))
    assert plan.memory in [shard.memory for shard in plan.shards]
    assert plan.memory.total == max(shard.memory.total for shard in plan.shards)


def test_a_million_tokens_on_eight_ranks_are_planned_rank_by_rank() -> None:
    overrides = ["data.sequence_length=1048576", "train.batch_sequences=1", "parallel.data=1"]
    path = CONFIGS / "prolong/350M/kvm-sqrt.yaml"
    one, eight = (
        make_plan(config(*overrides, "train.accumulation=1", f"parallel.sequence={ranks}", path=path))
        for ranks in (1, 8)
    )
    activations = [shard.memory.activations for shard in eight.shards]
    assert sum(activations) == one.memory.activations
    assert max(activations) < 1.7 * one.memory.activations / 8  # early shards are longer
    states = [shard.memory.states for shard in eight.shards]
    assert states[:7] == sorted(states[:7])  # the last sends nothing on
    assert max(states) < 0.1 * min(activations)


def test_a_checkpoint_holds_weights_and_moments_and_masters_where_they_differ() -> None:
    single, half = (make_plan(config(f"parallel.precision={p}")) for p in ("float32", "bfloat16"))
    assert single.checkpoint_bytes == 12 * single.parameters
    assert half.checkpoint_bytes == 14 * half.parameters
    kept = make_plan(config("train.steps=150", "checkpoint.every_steps=100", "checkpoint.keep=5"))
    assert kept.checkpoints_kept_bytes == 2 * kept.checkpoint_bytes


def test_the_command_prints_a_table_or_json() -> None:
    def run(*arguments: str) -> str:
        path = str(CONFIGS / "quickstart.yaml")
        command = [sys.executable, "-m", "launch.cli", "plan", path, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    printed = json.loads(run("--json", "--tokens-per-second", "1000"))
    plan = make_plan(config(), tokens_per_second=1000)
    assert printed["parameters"] == plan.parameters
    assert printed["memory"]["total"] == plan.memory.total
    assert printed["eta_seconds"] == plan.eta_seconds
    table = run()
    assert f"{plan.parameters:,}" in table
    assert "rwkv7" in table
    assert "shards of a sequence: the dearest rank costs 1.4 % more than the mean" in table
    assert "1,088" in table
