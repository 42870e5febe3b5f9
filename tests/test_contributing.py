"""The example layer and budget of CONTRIBUTING.md, run as they stand there."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, create_model

import models.budget
from models.backbone import Backbone
from models.cache import CachedSequence, read
from models.config import ModelConfig
from models.initialise import initialise
from models.loss import token_losses
from parallel.sequence.context import WholeSequence
from tests.models.shards import run_on_shards
from tests.models.tiny import tiny_batch, tiny_config

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"```python\n# (\S+\.py)\n(.*?)```", re.DOTALL)


@pytest.fixture
def examples() -> dict[str, str]:
    """File name -> code."""
    return dict(BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text()))


@pytest.fixture
def model(examples: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Backbone:
    for path in ("models/kinds/decayed_mean.py", "models/layers/decayed_mean.py"):
        name = path.removesuffix(".py").replace("/", ".")
        module = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(examples[path], path, "exec"), module.__dict__)
    config_type = sys.modules["models.kinds.decayed_mean"].DecayedMeanConfig
    line = examples["models/config.py"].strip()
    assert line == "decayed_mean: DecayedMeanConfig = DecayedMeanConfig()"
    extended: Any = create_model("Extended", __base__=ModelConfig, decayed_mean=(config_type, config_type()))
    values = tiny_config(["rwkv7"]).model_dump(exclude={"layers", "num_layers"})
    built = Backbone(extended(**values, layers=["decayed_mean", "rwkv7"], num_layers=3))
    initialise(built, seed=0)
    with torch.no_grad():
        built.embedding.weight.normal_(generator=torch.Generator().manual_seed(0))
        for parameter in built.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return built


def test_the_example_layer_is_a_kind_with_a_cost(model: Backbone) -> None:
    assert "decayed_mean" in model.config.known_kinds()
    stated = model.config.layer_config("decayed_mean").cost(model.config, 64).parameters
    mixer: Any = model.layers[0]
    assert stated == sum(parameter.numel() for parameter in mixer.mixer.parameters())


def test_the_example_layer_gives_on_shards_what_it_gives_on_one_rank(model: Backbone) -> None:
    ids, labels = tiny_batch(97)
    logits, gradients, _ = run_on_shards(model, ids, labels, [32, 64])
    expected = model(ids, WholeSequence())
    token_losses(expected, labels)[0].backward()
    assert torch.equal(logits, expected.detach())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert (sum(gradients[name]) - parameter.grad).abs().max() <= 1e-5 * parameter.grad.abs().max() + 1e-6


def test_the_example_layer_goes_on_from_a_cache(model: Backbone) -> None:
    ids, _ = tiny_batch(40)
    cache = CachedSequence()
    parts = [read(model, part, cache) for part in ids.split([7, 1, 32], dim=1)]
    assert torch.allclose(torch.cat(parts, dim=1), model(ids, WholeSequence()), atol=1e-5)


def test_the_example_budget_is_chosen_by_its_kind_and_never_shrinks(examples: dict[str, str]) -> None:
    namespace = {"math": __import__("math"), **vars(models.budget)}
    exec(examples["models/budget.py"], namespace)
    budget = TypeAdapter(namespace["LogarithmicBudget"]).validate_python(
        {"kind": "logarithmic", "factor": 64}
    )
    slots = [budget.slots_at(tokens) for tokens in range(0, 100_000, 777)]
    assert slots == sorted(slots)
    assert slots[-1] == 1062
