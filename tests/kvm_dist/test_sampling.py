from pathlib import Path

import pytest

from kvm_dist.exit_codes import ConfigError
from kvm_dist.sampling import sample


def test_an_empty_prompt_is_refused_by_its_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--prompt is empty"):
        sample(tmp_path, "", tokens=1, temperature=0.0, seed=0)


def test_a_prompt_that_is_not_utf_8_is_refused_by_its_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--prompt 'a\\udcff' is no text in UTF-8"):
        sample(tmp_path, b"a\xff".decode("utf-8", "surrogateescape"), tokens=1, temperature=0.0, seed=0)
