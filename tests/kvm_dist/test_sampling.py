from pathlib import Path

import pytest

from kvm_dist.exit_codes import ConfigError
from kvm_dist.sampling import sample


def test_an_empty_prompt_is_refused_by_its_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--prompt is empty"):
        sample(tmp_path, "", tokens=1, temperature=0.0, seed=0)
