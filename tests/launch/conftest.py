"""A run that nobody disturbs, made once: what every disturbed one has to end like."""

from pathlib import Path

import pytest

from tests.launch.tiny_run import TinyRun, write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    return folder


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> TinyRun:
    run = TinyRun(tmp_path_factory.mktemp("undisturbed"), corpus)
    run.train()
    return run
