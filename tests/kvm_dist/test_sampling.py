import unicodedata
from pathlib import Path

import pytest

from kvm_dist.exit_codes import ConfigError
from kvm_dist.sampling import readable, sample


def test_an_empty_prompt_is_refused_by_its_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--prompt is empty"):
        sample(tmp_path, "", tokens=1, temperature=0.0, seed=0)


def test_a_prompt_that_is_not_utf_8_is_refused_by_its_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--prompt 'a\\udcff' is no text in UTF-8"):
        sample(tmp_path, b"a\xff".decode("utf-8", "surrogateescape"), tokens=1, temperature=0.0, seed=0)


def test_control_characters_cannot_reprogram_a_terminal() -> None:
    text = "a\tb\n\x1b[2J\x0e\x07\r\x00\x7f\x9b é 日"
    shown = readable(text)
    assert shown == "a\tb\n\u241b[2J\u240e\u2407\u240d\u2400\u2421\ufffd é 日"
    assert not any(unicodedata.category(letter) == "Cc" for letter in shown if letter not in "\t\n")
