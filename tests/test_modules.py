"""Everything that is installed can be imported."""

import pkgutil
from importlib import import_module

import pytest

OF_EXTRAS = ("kvm_dist.evaluate.lm_eval",)  # installed by [eval] alone
MODULES = [
    module.name
    for package in ("parallel", "models", "kvm_dist", "launch")
    for module in pkgutil.walk_packages(import_module(package).__path__, f"{package}.")
    if not module.name.endswith("__main__") and module.name not in OF_EXTRAS
]


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_imported(name: str) -> None:
    import_module(name)


def test_all_folders_are_walked() -> None:
    assert {"models.kvm.kernels.jit.route", "kvm_dist.data.loader", "launch.cli"} <= set(MODULES)
