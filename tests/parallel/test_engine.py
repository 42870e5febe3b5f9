from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from parallel.config import ParallelConfig
from parallel.engine.deepspeed import Engine
from parallel.engine.settings import check_version, deepspeed_settings
from parallel.world import World
from tests.parallel.engine_case import (
    Case,
    Saved,
    engine_step,
    loaded_and_stepped,
    make_engine,
    micro_batches,
    reference,
    saved,
    trained,
)
from tests.support.ranks import Ranks

LAYOUTS = [(0, "float32"), (1, "float32"), (2, "float32"), (3, "float32")]
LAYOUTS += [(1, "bfloat16"), (2, "bfloat16"), (3, "bfloat16")]
layouts = pytest.mark.parametrize(("stage", "precision"), LAYOUTS)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Ranks]:
    with Ranks(1) as ranks:
        yield ranks


def assert_equal_bytes(ours: Saved, theirs: Saved) -> None:
    assert list(ours) == list(theirs)
    for name, tensors in ours.items():
        for kind, tensor in tensors.items():
            other = theirs[name][kind]
            assert tensor.dtype == other.dtype, (name, kind)
            assert tensor.shape == other.shape, (name, kind)
            assert torch.equal(bits(tensor), bits(other)), (name, kind)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def assert_close(ours: Any, wanted: Any, tolerance: float) -> None:
    for name, tensors in wanted.items():
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            scale = float(tensors[kind].abs().max())
            error = float((ours[name][kind] - tensors[kind]).abs().max())
            assert error <= tolerance * scale, (name, kind, error, scale)
        assert float(ours[name]["step"]) == float(tensors["step"])


@layouts
@pytest.mark.parametrize("clipping", [0.0, 0.05])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_steps_on_two_ranks_are_those_of_plain_torch(
    two_ranks: Ranks, stage: int, precision: str, clipping: float, accumulation: int
) -> None:
    case = Case(stage, precision, clipping, accumulation)
    wanted, norms = reference(case, 2)
    results = two_ranks.run(trained, case, 2)
    assert_equal_bytes(results[0][0], results[1][0])
    for ours, our_norms in results:
        assert all(isinstance(norm, float) for norm in our_norms)
        # the second step's bfloat16 weights may round the other way
        assert our_norms == pytest.approx(norms, rel=1e-5 if precision == "float32" else 5e-3)
        assert_close(ours, wanted, 2e-6 if precision == "float32" else 2e-2)


@layouts
def test_the_first_step_of_two_ranks_is_that_of_plain_torch_to_rounding(
    two_ranks: Ranks, stage: int, precision: str
) -> None:
    case = Case(stage, precision, 0.05, 2)
    wanted, norms = reference(case, 1)
    for ours, our_norms in two_ranks.run(trained, case, 1):
        assert our_norms == pytest.approx(norms, rel=2e-6)
        assert_close(ours, wanted, 2e-6)


@layouts
def test_one_process_takes_the_steps_of_plain_torch(one_rank: Ranks, stage: int, precision: str) -> None:
    case = Case(stage, precision, 0.05, 2, data=1)
    wanted, norms = reference(case, 1)
    ((ours, our_norms),) = one_rank.run(trained, case, 1)
    assert our_norms == pytest.approx(norms, rel=2e-6)
    assert_close(ours, wanted, 2e-6)


def uninterrupted_and_resumed(world: World, case: Case) -> tuple[Saved, Saved, Saved, Saved]:
    """(saved after 2 steps, loaded elsewhere, after the third step without a break, and with one)."""
    engine = make_engine(world, case)
    for step in range(2):
        engine_step(engine, world, case, step)
    at_two = saved(engine)
    engine_step(engine, world, case, 2)
    resumed = make_engine(world, case)
    resumed.load_named_tensors(at_two.__getitem__)
    loaded = saved(resumed)
    engine_step(resumed, world, case, 2)
    return at_two, loaded, saved(engine), saved(resumed)


@layouts
def test_resuming_at_the_same_layout_changes_no_bit(two_ranks: Ranks, stage: int, precision: str) -> None:
    for at_two, loaded, whole, resumed in two_ranks.run(
        uninterrupted_and_resumed, Case(stage, precision, 0.05, 2)
    ):
        assert_equal_bytes(loaded, at_two)
        assert_equal_bytes(resumed, whole)


def went_back(world: World, case: Case) -> tuple[Saved, Saved]:
    """(after the third step, after a fourth, a poisoned one, a load of step 2 and the third step again)"""
    engine = make_engine(world, case)
    for step in range(2):
        engine_step(engine, world, case, step)
    at_two = saved(engine)
    engine_step(engine, world, case, 2)
    whole = saved(engine)
    engine_step(engine, world, case, 3)
    engine_step(engine, world, case, 4, poison=True)
    engine.load_named_tensors(at_two.__getitem__)
    engine_step(engine, world, case, 2)
    return whole, saved(engine)


@layouts
def test_an_engine_that_has_trained_on_can_go_back(two_ranks: Ranks, stage: int, precision: str) -> None:
    for whole, again in two_ranks.run(went_back, Case(stage, precision, 0.05, 2)):
        assert_equal_bytes(again, whole)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_checkpoint_restores_its_bytes_at_every_other_layout(
    one_rank: Ranks, two_ranks: Ranks, four_ranks: Ranks, precision: str
) -> None:
    case = Case(1, precision, 0.05, 2)
    start, _ = two_ranks.run(trained, case, 2)[0]
    start["inner.bias"]["exp_avg"][0] = -0.0
    _, wanted, norm = two_ranks.run(loaded_and_stepped, case, start, 2)[0]
    for ranks in (one_rank, two_ranks, four_ranks):
        for stage in range(0 if precision == "float32" else 1, 4):
            other = case.with_world(stage, ranks.size)
            for loaded, ours, our_norm in ranks.run(loaded_and_stepped, other, start, 2):
                assert_equal_bytes(loaded, start)
                assert our_norm == pytest.approx(norm, rel=2e-6)
                assert_close(ours, wanted, 2e-6)


def poisoned(world: World, case: Case) -> tuple[list[bool], list[float], Saved, Saved, Saved]:
    """A step, a poisoned one, a step. (applied, norms, before and after the poison, at the end)"""
    engine = make_engine(world, case)
    results = [engine_step(engine, world, case, 0)]
    before = saved(engine)
    results.append(engine_step(engine, world, case, 1, poison=True))
    after = saved(engine)
    results.append(engine_step(engine, world, case, 1))
    return [r.applied for r in results], [r.gradient_norm for r in results], before, after, saved(engine)


@layouts
def test_a_gradient_that_is_not_finite_on_one_rank_changes_nothing_on_any(
    two_ranks: Ranks, stage: int, precision: str
) -> None:
    case = Case(stage, precision, 0.05, 2)
    never_poisoned = two_ranks.run(trained, case, 2)
    for (applied, norms, before, after, end), (wanted, _) in zip(
        two_ranks.run(poisoned, case), never_poisoned, strict=True
    ):
        assert applied == [True, False, True]
        assert not torch.isfinite(torch.tensor(norms[1]))
        assert_equal_bytes(after, before)
        assert_equal_bytes(end, wanted)


def forward_weights(world: World, case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """After a load: whole weights of the model under `gathered`, the named ones, logits of a batch."""
    start = saved(make_engine(world, case))
    for tensors in start.values():
        tensors["master"] += 1
        tensors["parameter"] += 1
    engine = make_engine(world, case)
    engine.load_named_tensors(start.__getitem__)
    with engine.gathered():
        whole = [parameter.detach().clone() for parameter in engine.module.parameters()]
    with torch.no_grad():
        logits = engine.module(micro_batches(0, 1)[0])
    return whole, [tensors["parameter"] for tensors in saved(engine).values()], logits


@layouts
def test_loading_changes_the_weights_that_the_forward_uses(
    two_ranks: Ranks, stage: int, precision: str
) -> None:
    start = [
        tensors["parameter"] for tensors in two_ranks.run(trained, Case(stage, precision), 0)[0][0].values()
    ]
    for whole, named, _ in two_ranks.run(forward_weights, Case(stage, precision)):
        assert [w.dtype for w in whole] == [n.dtype for n in named]
        assert all(torch.equal(a, b) for a, b in zip(whole, named, strict=True))
        assert not any(torch.equal(a, b) for a, b in zip(whole, start, strict=True))


def test_loading_gives_the_same_forward_at_every_stage(two_ranks: Ranks) -> None:
    logits = [two_ranks.run(forward_weights, Case(stage))[0][2] for stage in range(4)]
    assert all(torch.equal(logits[0], other) for other in logits[1:])


def times_that_the_device_is_stopped(world: World, case: Case, steps: int) -> int:
    engine = make_engine(world, case)
    from deepspeed.accelerator import get_accelerator

    device, stopped = get_accelerator(), 0

    def stop(*_: Any) -> None:
        nonlocal stopped
        stopped += 1

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(device, "synchronize", stop)
        for step in range(steps):
            engine_step(engine, world, case, step)
    return stopped


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_no_step_stops_the_device(one_rank: Ranks, stage: int) -> None:
    assert one_rank.run(times_that_the_device_is_stopped, Case(stage, accumulation=2), 4) == [0]


def described(world: World, case: Case) -> dict[str, str | int | float]:
    return make_engine(world, case).describe()


def test_the_engine_says_which_optimizer_and_dtypes_it_runs(two_ranks: Ranks) -> None:
    wrappers = {
        (0, "float32"): "AdamW",
        (1, "float32"): "DeepSpeedZeroOptimizer",
        (1, "bfloat16"): "BF16_Optimizer",
        (3, "bfloat16"): "DeepSpeedZeroOptimizer_Stage3",
    }
    for (stage, precision), wrapper in wrappers.items():
        description = two_ranks.run(described, Case(stage, precision, 0.5))[0]
        assert (description["optimizer"], description["wrapper"]) == ("AdamW", wrapper)
        assert (description["weights"], description["accumulation"]) == (precision, "float32")
        assert description["gradient_clipping"] == 0.5


@pytest.mark.parametrize("version", ["0.17.6", "0.18.3", "0.19.0", "0.19.3+cu12"])
def test_versions_that_lose_gradients_are_refused_for_stage_2(version: str) -> None:
    with pytest.raises(ValueError, match=r"install deepspeed >= 0\.19\.4"):
        check_version(version, 2)
    check_version(version, 1)


@pytest.mark.parametrize("version", ["0.17.5", "0.19.4", "0.20.0"])
def test_other_versions_are_admitted(version: str) -> None:
    check_version(version, 2)


def test_one_bucket_holds_all_parameters_when_a_sequence_is_split() -> None:
    split = deepspeed_settings(ParallelConfig(sequence=2, bucket_elements=10), 2, 1001, 1.0, 4)
    whole = deepspeed_settings(ParallelConfig(data=2, bucket_elements=10), 2, 1001, 1.0, 4)
    assert split["zero_optimization"]["reduce_bucket_size"] == 1002
    assert whole["zero_optimization"]["reduce_bucket_size"] == 10


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nothing_that_changes_a_number_is_left_to_deepspeed(stage: int) -> None:
    settings = deepspeed_settings(ParallelConfig(zero_stage=stage), 1, 10, 0.0, 1)
    assert settings["gradient_clipping"] == 0.0  # left out it would be 1.0
    written = {"gradient_accumulation_steps", "prescale_gradients", "gradient_predivide_factor"}
    written |= {"communication_data_type", "data_types", "fp16", "bf16", "zero_optimization"}
    assert written <= set(settings)
    assert settings["bf16"]["check_grad_overflow"] is True
    sizes = {"reduce_bucket_size", "allgather_bucket_size", "overlap_comm", "contiguous_gradients"}
    assert sizes <= set(settings["zero_optimization"])


def misgrouped(kind: str) -> tuple[nn.Module, list[dict[str, Any]]]:
    model = nn.Linear(2, 2)
    model.gain = nn.Parameter(torch.tensor(1.0) if kind == "scalar" else torch.ones(1))
    every = list(model.parameters())
    parts: dict[str, list[list[nn.Parameter]]] = {
        "missing": [every[:2]],
        "twice": [every, every[:1]],
        "empty": [every, []],
        "scalar": [every],
    }
    return model, [{"params": part} for part in parts[kind]]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", r"parameters in no group: \['gain'\]"),
        ("twice", "parameter group 1: weight must be in exactly one group"),
        ("empty", "parameter group 1 is empty"),
        ("scalar", r"0-dim parameters \['gain'\]"),
    ],
)
def test_groups_that_deepspeed_would_fail_on_are_refused(kind: str, message: str) -> None:
    model, groups = misgrouped(kind)
    world = World(0, 1, 0, 1, 0, torch.device("cpu"), "gloo")
    with pytest.raises(ValueError, match=message):
        Engine(
            model,
            groups,
            ParallelConfig(),
            world,
            betas=(0.9, 0.95),
            eps=1e-8,
            gradient_clipping=0.0,
            accumulation=1,
            device=world.device,
        )
