"""Every configuration in configs/ loads, and the recipe's numbers arrive."""

from pathlib import Path

import pytest

from kvm_dist.load import load_config

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda p: str(p.relative_to(CONFIGS)))
def test_a_shipped_configuration_loads(path: Path) -> None:
    load_config(path)


@pytest.mark.parametrize(
    "path", sorted(CONFIGS.glob("prolong/*M/*.yaml")), ids=lambda p: f"{p.parent.name}-{p.stem}"
)
def test_a_run_of_the_recipe_has_524288_tokens_a_step_and_its_own_name(path: Path) -> None:
    config = load_config(path).config
    assert config.train.batch_sequences * config.data.sequence_length == 524_288
    assert config.model.head_width == 128
    if path.stem != "base":
        assert config.name == f"prolong-{path.parent.name}-{path.stem}"


def test_longer_runs_of_the_recipe_scale_rate_and_decay_with_the_root_of_their_steps() -> None:
    short = load_config(CONFIGS / "prolong/120M/kvm-sqrt.yaml").config
    long = load_config(CONFIGS / "prolong/350M/kvm-sqrt.yaml").config
    scale = (short.train.steps / long.train.steps) ** 0.5
    assert long.optimizer.learning_rate == pytest.approx(short.optimizer.learning_rate * scale, rel=1e-5)
    assert long.optimizer.weight_decay == pytest.approx(short.optimizer.weight_decay * scale, rel=1e-5)
    assert (short.model.depth_scale, long.model.depth_scale) == (1.0, 0.5)


def test_the_budgets_of_the_families_are_those_of_the_paper() -> None:
    def slots(family: str) -> int:
        return load_config(CONFIGS / f"prolong/350M/{family}.yaml").config.model.kvm.budget.slots_at(32_768)

    assert (slots("kvm-256"), slots("kvm-sqrt"), slots("kvm-swa")) == (256, 2896, 992)


def test_the_quickstart_runs_two_processes_on_one_sequence() -> None:
    config = load_config(CONFIGS / "quickstart.yaml").config
    assert (config.parallel.data, config.parallel.sequence) == (1, 2)
    assert config.data.source == "python-stdlib"
    assert config.data.sequence_length >= 2048
    assert set(config.model.layer_kinds) == {"kvm", "rwkv7"}
