import pytest

from models.config import FullAttentionConfig, ModelConfig
from models.folder.card import CardFacts, model_card
from tests.models.tiny import tiny_config


def card(model: ModelConfig, tokenizer: str | None = "bytes") -> str:
    return model_card(model, 1_234, "float32", tokenizer, CardFacts("small", "a test"))


def test_neighbours_of_one_kind_share_a_row_and_settings_are_words() -> None:
    text = card(
        tiny_config(["kvm", "kvm", "full_attention"] * 2, full_attention=FullAttentionConfig(rotary_dims=0))
    )
    assert "| 0-1, 3-4 | Key-Value Means | chunk 16, window chunks 2, sinks 1, head temperatures," in text
    assert "no gate appends" in text
    assert "| 2, 5 | full attention | rotary dims 0 |" in text


def test_many_layers_in_turn_are_shortened() -> None:
    text = card(tiny_config(["kvm", "rwkv7"] * 6))
    assert "| 0, 2, ..., 10 | Key-Value Means |" in text
    assert "| 1, 3, ..., 11 | RWKV-7 |" in text


def test_a_model_without_kvm_has_no_budget() -> None:
    assert "slots" not in card(tiny_config(["rwkv7"]))


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        ("bytes", "loads without kvm-dist"),
        ("rwkv-world", "without `import models.hf` it does not load"),
        (".", "The tokenizer's files lie in this folder"),
        (None, "The folder has no tokenizer"),
    ],
)
def test_the_card_is_honest_about_the_tokenizer(tokenizer: str | None, expected: str) -> None:
    text = card(tiny_config(["rwkv7"]), tokenizer)
    assert expected in text
    assert ("AutoTokenizer.from_pretrained" in text) == (tokenizer is not None)


def test_nothing_is_claimed_of_a_training_that_is_not_known() -> None:
    assert "## Training" not in card(tiny_config(["kvm"]))


def test_recurrences_are_called_by_the_names_of_their_papers() -> None:
    text = card(tiny_config(["deltanet", "gla"]))
    assert "| 0 | DeltaNet |" in text
    assert "| 1 | Gated Linear Attention |" in text
