"""Runs that start from the weights of a trained model, and models that go on with another budget."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvm_dist import train as training
from kvm_dist.config import DataConfig, RunConfig, TrainConfig
from kvm_dist.exit_codes import ConfigError, StorageError
from kvm_dist.heartbeat import Heartbeat
from kvm_dist.load import dump_config, load_config
from kvm_dist.origin import Origin, read_origin
from kvm_dist.pretrained import open_pretrained
from kvm_dist.run_directory import RunDirectory, open_run_directory
from kvm_dist.run_parts import build_engine, new_model
from kvm_dist.sampling import sample
from kvm_dist.signals import StopRequest
from kvm_dist.tracking.description import description
from kvm_dist.warm_start import differing_keys, start_weights, weights_sha256
from models.backbone import Backbone
from models.budget import FixedBudget, SaturatingBudget
from models.config import KVMConfig, ModelConfig
from parallel.config import ParallelConfig
from parallel.sequence.context import WholeSequence
from parallel.world import World, join_world, leave_world
from tests.kvm_dist.checkpoint_samples import save_tensors
from tests.launch.tiny_run import TinyRun, write_corpus
from tests.models.tiny import tiny_batch, tiny_config, tiny_model
from tests.support.ranks import Ranks

LAYERS = ["kvm", "rwkv7"]
STEP = 40


def save_trained(folder: Path, model: Backbone, precision: str = "float32", **data: Any) -> Path:
    """A checkpoint of `model`; of bfloat16 weights with the masters that they were rounded from."""
    parallel = ParallelConfig.model_validate({"precision": precision})
    config = RunConfig(model=model.config, parallel=parallel, data=DataConfig(**data))
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.state_dict().items():
        tensors[name] = parameter.to(getattr(torch, precision))
        if precision != "float32":
            tensors[f"master.{name}"] = parameter
    return save_tensors(folder, STEP, tensors, config_text=dump_config(config)).path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, alone: World) -> Path:
    """With the threads of what it is compared with: several round an orthogonal matrix in their own way."""
    return save_trained(tmp_path_factory.mktemp("trained"), tiny_model(LAYERS))


def run_config(root: Path, path: Path, model: ModelConfig, **train: Any) -> RunConfig:
    return RunConfig(run_root=root, model=model, train=TrainConfig(start_from=path, **train), device="cpu")


def started(config: RunConfig, world: World) -> tuple[Backbone, Origin | None]:
    config.run_directory.mkdir(parents=True, exist_ok=True)
    model = new_model(config)
    return model, start_weights(model, config, RunDirectory(config.run_directory), world)


@pytest.fixture(scope="module")
def alone() -> Iterator[World]:
    threads = torch.get_num_threads()
    yield join_world(ParallelConfig(threads_per_rank=1), "cpu")
    leave_world()
    torch.set_num_threads(threads)


def changed(**settings: Any) -> ModelConfig:
    return tiny_config(LAYERS, kvm=KVMConfig(**{"chunk": 16, **settings}))


def test_weights_go_on_under_another_budget_and_are_noted(
    tmp_path: Path, trained: Path, alone: World
) -> None:
    model = changed(budget=SaturatingBudget(limit=24), backend="torch", max_slots=20)
    config = run_config(tmp_path, trained, model.model_copy(update={"activation_checkpointing": True}))
    found, origin = started(config, alone)
    for name, wanted in tiny_model(LAYERS).state_dict().items():
        assert torch.equal(found.state_dict()[name], wanted), name
    assert origin is not None
    assert (origin.path, origin.step) == (str(trained), STEP)
    noted = json.loads((config.run_directory / "started_from.json").read_text())
    assert noted == asdict(origin)
    tags = description(config, {})["tags"]
    assert tags["kvm_dist.started_from.weights_sha256"] == origin.weights_sha256
    assert tags["kvm_dist.started_from.path"] == str(trained)


def test_masters_are_taken_where_weights_are_rounded(tmp_path: Path, alone: World) -> None:
    path = save_trained(tmp_path / "rounded", tiny_model(LAYERS), "bfloat16")
    found, _ = started(run_config(tmp_path, path, tiny_config(LAYERS)), alone)
    for name, wanted in tiny_model(LAYERS).state_dict().items():
        assert torch.equal(found.state_dict()[name], wanted), name


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (tiny_config(LAYERS, kvm=KVMConfig(chunk=16, kv_heads=1)), "model.kvm.kv_heads: 2 there, 1 here"),
        (tiny_config(LAYERS, hidden_size=64), "model.hidden_size: 32 there, 64 here"),
        (tiny_config(["kvm", "kvm"]), r"model.layers: \['kvm', 'rwkv7'\] there.*\d+ more parameters"),
        (changed(chunk=8), "model.kvm.chunk: 16 there, 8 here.*start_from_allows"),
        (changed(sinks=0), "model.kvm.sinks: 1 there, 0 here"),
        (tiny_config(LAYERS, rotary_base=5e5), "model.kvm.rotary_base: 10000.0 there, 500000.0 here"),
    ],
)
def test_another_model_is_refused_by_its_keys(
    tmp_path: Path, trained: Path, alone: World, model: ModelConfig, named: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s)its weights do not fit.*{named}"):
        started(run_config(tmp_path, trained, model), alone)
    assert not (tmp_path / "run" / "started_from.json").exists()


def test_weights_mean_something_else_only_if_asked(tmp_path: Path, trained: Path, alone: World) -> None:
    model = changed(chunk=8, sinks=0)
    with pytest.raises(ConfigError, match=r"sinks(?!.*chunk: )"):
        started(run_config(tmp_path, trained, model, start_from_allows=["model.kvm.chunk"]), alone)
    _, origin = started(run_config(tmp_path, trained, model, start_from_allows=["model.kvm"]), alone)
    assert origin is not None
    with pytest.raises(ConfigError, match=r"'model.kvm.chunks'.* name no key"):
        started(run_config(tmp_path, trained, model, start_from_allows=["model.kvm.chunks"]), alone)


def test_parameters_of_another_shape_are_refused_even_if_asked(
    tmp_path: Path, trained: Path, alone: World
) -> None:
    model = changed(kv_heads=1)
    with pytest.raises(ConfigError, match=r"projections.key.weight: \[32, 32\] there, \[16, 32\] here"):
        started(run_config(tmp_path, trained, model, start_from_allows=["model"]), alone)


def test_settings_are_compared_as_they_are_in_force() -> None:
    one = tiny_config(LAYERS)
    same = tiny_config(
        [*LAYERS, *LAYERS],
        num_layers=2,
        head_dim=16,
        residual_scale=1.0,
        sliding_window={"window": 64},
        kvm=KVMConfig(chunk=16, rotary_dims=8, kv_heads=2, budget=FixedBudget(slots=16)),
    )
    assert list(differing_keys(one, same)) == []
    other = tiny_config(LAYERS, kvm=KVMConfig(chunk=16, rotary_dims=4))
    assert list(differing_keys(one, other)) == [("model.kvm.rotary_dims", 8, 4)]


@pytest.mark.parametrize("kind", ["kvm", "gated_deltanet", "kda", "mamba2", "deltanet", "gla"])
def test_weights_go_on_whatever_computes_a_layer(kind: str) -> None:
    one, other = (tiny_config([kind], **{kind: {"backend": backend}}) for backend in ("auto", "torch"))
    assert one != other
    assert list(differing_keys(one, other)) == []


def test_what_is_missing_or_damaged_is_refused(tmp_path: Path, trained: Path, alone: World) -> None:
    model = tiny_config(LAYERS)
    with pytest.raises(ConfigError, match=r"train.start_from=.*nowhere: nothing is there"):
        started(run_config(tmp_path, tmp_path / "nowhere", model), alone)
    damaged = tmp_path / trained.name
    shutil.copytree(trained, damaged)
    file = damaged / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(StorageError, match=r"train.start_from: .*model.safetensors"):
        started(run_config(tmp_path, damaged, model), alone)


def test_another_tokenizer_is_refused(tmp_path: Path, alone: World) -> None:
    model = tiny_model(LAYERS)
    path = save_trained(tmp_path / "other", model, tokenizer="rwkv-world")
    with pytest.raises(ConfigError, match=r"tokenizer rwkv-world, this run has data.tokenizer=bytes"):
        started(run_config(tmp_path, path, model.config), alone)


def engine_after_start(world: World, root: str, path: str, stage: int) -> dict[str, dict[str, Tensor]]:
    """What the engine of a rank holds. Only rank 0 is told where the weights are."""
    known = Path(path) if world.rank == 0 else Path(root) / "unseen"
    parallel = ParallelConfig.model_validate({"data": world.size, "zero_stage": stage})
    config = run_config(Path(root), known, tiny_config(LAYERS)).model_copy(
        update={"parallel": parallel, "seed": world.rank}
    )
    model, origin = started(config, world)
    assert origin is not None
    assert weights_sha256(model) == origin.weights_sha256, "before any engine has the model"
    _, _, engine = build_engine(config, world, model)
    tensors = dict(engine.named_tensors())
    ids, _ = tiny_batch(40)
    with torch.no_grad():
        tensors["logits"] = {"of": engine.module(ids, WholeSequence())}
    return tensors


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_all_ranks_hold_the_same_weights_and_fresh_moments_at_every_stage(
    tmp_path: Path, trained: Path, two_ranks: Ranks, stage: int
) -> None:
    model = tiny_model(LAYERS).eval()
    for found in two_ranks.run(engine_after_start, str(tmp_path), str(trained), stage):
        logits = found.pop("logits")["of"]
        with torch.no_grad():
            assert torch.equal(logits, model(tiny_batch(40)[0], WholeSequence()))
        for name, wanted in model.state_dict().items():
            assert torch.equal(found[name]["master"], wanted), name
            assert not found[name]["exp_avg"].any(), name
            assert found[name]["step"] == 0


BUDGETS = [
    (["model.kvm.budget.kind=fixed", "model.kvm.budget.slots=24"], FixedBudget(slots=24)),
    (["model.kvm.budget.slots=24", "model.kvm.budget.kind=fixed"], FixedBudget(slots=24)),
    (["model.kvm.budget={kind: fixed, slots: 24}"], FixedBudget(slots=24)),
    (["model.kvm.budget.kind=saturating", "model.kvm.budget.limit=24"], SaturatingBudget(limit=24)),
]


@pytest.mark.parametrize(("overrides", "budget"), BUDGETS)
def test_a_model_is_opened_with_a_budget_of_another_kind(
    trained: Path, overrides: list[str], budget: Any
) -> None:
    opened = open_pretrained(trained, overrides)
    assert opened.config.model.kvm.budget == budget
    wanted, ids = Backbone(changed(budget=budget)), tiny_batch(120)[0]
    wanted.load_state_dict(tiny_model(LAYERS).state_dict())
    with torch.no_grad():
        found = opened.model(ids, WholeSequence())
        assert torch.equal(found, wanted(ids, WholeSequence()))
        assert not torch.equal(found, open_pretrained(trained).model(ids, WholeSequence()))


def test_a_sample_is_taken_with_the_changes_asked_for(trained: Path) -> None:
    def text(change: str) -> str:
        return sample(trained, "\x07\x08", tokens=3, temperature=0.0, seed=0, overrides=[change])

    assert text("model.kvm.budget={kind: fixed, slots: 16}").startswith("\x07\x08")
    with pytest.raises(ConfigError, match=r"model.kvm.budgets: unknown key"):
        text("model.kvm.budgets=1")


def trained_here(world: World, config: RunConfig) -> None:
    """What a rank does between joining its world and leaving it."""
    directory = RunDirectory(config.run_directory)
    heartbeat = Heartbeat(directory.heartbeats, world.rank, 1)
    training._train(config, directory, world, StopRequest(), heartbeat)
    heartbeat.close()


def test_a_run_starts_from_another_and_resumes_without_it(tmp_path: Path, two_ranks: Ranks) -> None:
    write_corpus(tmp_path)
    config = TinyRun(tmp_path, tmp_path).config
    parent = tmp_path / "parent"
    save_trained(parent / "checkpoints", new_model(load_config(config).config))
    overrides = [
        f"train.start_from={parent}",
        "train.steps=2",
        "model.kvm.budget={kind: fixed, slots: 32}",
        "checkpoint.every_steps=1",
        "evaluation.validation_sequences=0",
        "evaluation.sample_prompts=[]",
    ]
    loaded = load_config(config, overrides)
    directory = open_run_directory(loaded)
    two_ranks.run(trained_here, loaded.config)
    shutil.rmtree(parent)
    shutil.rmtree(directory.checkpoints / "step-00000002")
    open_run_directory(loaded)
    two_ranks.run(trained_here, loaded.config)
    metrics = [json.loads(line) for line in directory.metrics_path.read_text().splitlines()]
    assert [(line["step"], line["train/tokens"]) for line in metrics] == [(1, 4 * 121), (2, 8 * 121)]
    assert [line["fault/restarts"] for line in metrics] == [0, 1]
    origin = read_origin(directory)
    assert origin is not None
    assert (origin.path, origin.step) == (str(parent / "checkpoints" / "step-00000040"), STEP)
    with pytest.raises(ConfigError, match=r"train.start_from: .*parent.* -> nothing"):
        open_run_directory(load_config(config, overrides[1:]))
