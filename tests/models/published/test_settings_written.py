from typing import Any

import pytest

from models.budget import FixedBudget, SaturatingBudget
from models.config import KVMConfig, ModelConfig, RWKV7Config, SlidingWindowConfig
from models.published.settings import model_config
from models.published.settings_written import published_settings
from tests.models.published.test_settings import published
from tests.models.tiny import tiny_config

FAMILIES = ["bswa", "gptalpha", "kvm_sqrt", "kvm_swa", "ovq_swa", "rwkv7"]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_published_model_is_written_as_it_was_read(name: str) -> None:
    model = model_config(published(name))
    assert model_config(published_settings(model, "float32")) == model


@pytest.mark.parametrize(
    ("layers", "changes"),
    [
        (["kvm", "rwkv7"], {"rwkv7": RWKV7Config(head_dim=16)}),
        (["sliding_window", "kvm", "kvm"], {"rotary_base": 500.0}),
        (["sliding_window", "full_attention"], {"token_shift": False}),
        (["rwkv7"], {"num_heads": 1, "rwkv7": RWKV7Config(head_dim=8)}),
        (["ovq"], {"value_residual": False, "feed_forward_shift": False}),
        (["sliding_window", "ovq"], {"sliding_window": SlidingWindowConfig(window=8, rotary_base=77.0)}),
        (["kvm"], {"kvm": KVMConfig(chunk=16, budget=FixedBudget(slots=32), gate_appends=True, sinks=0)}),
        (["kvm"], {"kvm": KVMConfig(chunk=16, budget=SaturatingBudget(limit=64, minimum=9, round_down=4))}),
    ],
    ids=str,
)
def test_models_of_ours_are_written_so_that_they_read_back_the_same(
    layers: list[str], changes: dict[str, Any]
) -> None:
    model = tiny_config(layers * 2, **changes)
    back = model_config(published_settings(model, "bfloat16"))
    assert back.layer_kinds == model.layer_kinds
    assert published_settings(back, "bfloat16") == published_settings(model, "bfloat16")
    for name in (
        "depth_scale",
        "head_width",
        "ffn_width",
        "token_shift",
        "shifts_feed_forward",
        "base_width",
    ):
        if name != "head_width" or layers != ["rwkv7"]:  # which has heads of its own
            assert getattr(back, name) == getattr(model, name)
    for kind in set(layers) & {"kvm", "sliding_window", "full_attention", "ovq"}:
        ours, theirs = model.layer_config(kind), back.layer_config(kind)
        assert theirs.rotary(16) == ours.rotary(16)  # type: ignore[attr-defined]
        bases = [c.rotary_base or m.rotary_base for c, m in ((ours, model), (theirs, back))]  # type: ignore[attr-defined]
        assert bases[0] == bases[1]


def kvm(**changes: Any) -> dict[str, KVMConfig]:
    return {"kvm": KVMConfig(chunk=16, **changes)}


REFUSED: list[tuple[list[str], dict[str, Any], str]] = [
    (["kvm", "kvm", "rwkv7"], {}, "model.layers="),
    (["kvm", "rwkv7", "sliding_window"], {}, "model.layers="),
    (["sliding_window", "sliding_window", "kvm"], {}, "model.layers="),
    (["mamba2"], {}, "mamba2, which the published layout has no mixer for"),
    (["kvm"], kvm(kv_heads=1), "model.kvm.kv_heads=1"),
    (["kvm"], kvm(max_slots=100), "model.kvm.max_slots=100"),
    (["rwkv7"], {"rwkv7": RWKV7Config(head_dim=16, gate_rank=64)}, "model.rwkv7.gate_rank=64"),
    (["sliding_window", "rwkv7"], {"rwkv7": RWKV7Config(head_dim=8)}, "width 8 are not hidden_size"),
    (["block_window", "kvm"], {}, "one chunk_len for all kinds of layers"),
]


@pytest.mark.parametrize(("layers", "changes", "message"), REFUSED, ids=[str(case[:2]) for case in REFUSED])
def test_what_the_published_layout_cannot_say_is_named(
    layers: list[str], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        published_settings(tiny_config(layers, **changes), "float32")


def test_as_many_key_value_heads_as_heads_are_the_same_whether_said_or_not() -> None:
    said = tiny_config(["kvm"], **kvm(kv_heads=2))
    assert published_settings(said, "float32") == published_settings(tiny_config(["kvm"], **kvm()), "float32")


def test_how_a_model_runs_is_no_part_of_what_it_is() -> None:
    model = tiny_config(["kvm"])
    faster = model.model_copy(
        update={
            "activation_checkpointing": True,
            "kvm": model.kvm.model_copy(update={"backend": "reference"}),
        }
    )
    assert published_settings(faster, "float32") == published_settings(model, "float32")


def test_a_written_file_has_every_setting_of_a_published_one() -> None:
    written = published_settings(ModelConfig(layers=["kvm"]), "float32")
    others = ("kda_", "gated_deltanet_", "lact_")
    cosmetic = {
        "id2label",
        "label2id",
        "transformers_version",
        "problem_type",
        "return_dict",
        "output_attentions",
    }
    cosmetic |= {
        "output_hidden_states",
        "chunk_size_feed_forward",
        "max_position_embeddings",
        "model_class_path",
    }
    cosmetic |= {"pad_token_id", "bos_token_id", "eos_token_id"}
    expected = {key for key in published("kvm_sqrt") if not key.startswith(others)} - cosmetic
    assert expected - written.keys() == set()
