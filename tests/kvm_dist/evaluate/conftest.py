from pathlib import Path

import pytest

from kvm_dist.data.tokenizer import RWKVWorldTokenizer
from tests.kvm_dist.evaluate.tiny_checkpoint import TinyRun, make_tiny_run


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """Not to be written into: for that there is `make_tiny_run`."""
    root: Path = tmp_path_factory.mktemp("evaluated")
    return make_tiny_run(root)


@pytest.fixture(scope="session")
def world() -> RWKVWorldTokenizer:
    """Seconds to make: once."""
    return RWKVWorldTokenizer()


def nobody_watches(done: int, total: int) -> None:
    assert 0 < done <= total
