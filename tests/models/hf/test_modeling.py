"""The forward of the Hugging Face model against the backbone it wraps."""

from typing import Any

import pytest
import torch

from models.hf import KVMDistCache, KVMDistConfig, KVMDistForCausalLM
from models.layers import segment
from models.loss import token_losses
from parallel.sequence.context import WholeSequence
from tests.models.golden import golden_model
from tests.models.hf.faces import GOLDEN_FAMILIES, backbone, dressed, face
from tests.models.tiny import tiny_batch, tiny_config


@pytest.mark.parametrize("family", GOLDEN_FAMILIES)
def test_logits_are_the_authors(family: str) -> None:
    golden = golden_model(family)
    with torch.no_grad():
        logits = dressed(golden.model)(golden.input_ids).logits

    assert (logits - golden.logits).abs().max() <= 1e-5


@pytest.mark.parametrize("family", ["kvm_sqrt", "all kinds", "recurrences"])
def test_loss_and_gradients_are_those_of_the_backbone(family: str) -> None:
    model, plain = face(family).train(), backbone(family)
    ids, labels = tiny_batch(29)
    model(ids, labels=labels).loss.backward()
    total, valid = token_losses(plain(ids, WholeSequence())[:, :-1], labels[:, 1:])
    (total / valid).backward()

    expected = dict(plain.named_parameters())
    for name, parameter in model.backbone.named_parameters():
        found, wanted = parameter.grad, expected[name].grad
        assert found is not None, name
        assert wanted is not None, name
        assert torch.equal(found, wanted), name


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["kvm_sqrt", "all kinds"])
def test_padding_changes_neither_loss_nor_gradients(family: str, side: str) -> None:
    model, alone = face(family).train(), face(family).train()
    ids = tiny_batch(29, batch=3)[0]
    lengths = (29, 11, 18)
    mask = torch.stack([torch.arange(29) < length for length in lengths]).long()
    if side == "left":
        mask = mask.flip(1)
    output = model(ids, attention_mask=mask, labels=ids)
    output.loss.backward()
    scored = sum(length - 1 for length in lengths)
    for row in range(3):
        single = ids[row][mask[row] == 1].unsqueeze(0)
        found = alone(single, labels=single, num_items_in_batch=scored)
        found.loss.backward()
        assert (output.logits[row][mask[row] == 1] - found.logits[0]).abs().max() <= 1e-5

    largest = max(p.grad.abs().max() for p in alone.parameters())
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert (ours.grad - theirs.grad).abs().max() <= 1e-5 * largest, name


def test_a_hidden_position_repeats_the_last_token_before_it() -> None:
    model = face("kvm_sqrt")
    ids = tiny_batch(12, batch=1)[0]
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1, 1, 1, 0, 0]])
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits[0]
        seen = model(ids[mask == 1].unsqueeze(0)).logits[0]

    assert not logits[:2].any()
    assert torch.equal(logits[[4, 10, 11]], logits[[3, 9, 9]])
    assert (logits[mask[0] == 1] - seen).abs().max() <= 1e-5


def test_only_the_columns_asked_for_get_logits() -> None:
    model = face("rwkv7")
    ids = tiny_batch(20)[0]
    with torch.no_grad():
        whole = model(ids).logits
        assert torch.equal(model(ids, logits_to_keep=3).logits, whole[:, -3:])
        columns = torch.tensor([0, 7])
        assert torch.equal(model(ids, logits_to_keep=columns).logits, whole[:, columns])


def test_a_cache_comes_back_where_it_is_wanted() -> None:
    model = face("kvm_sqrt")
    ids = tiny_batch(9)[0]
    cache = model(ids).past_key_values

    assert isinstance(cache, KVMDistCache)
    assert cache.get_seq_length() == 9
    assert model(ids, use_cache=False).past_key_values is None
    assert model(ids, labels=ids).past_key_values is None
    assert model.train()(ids).past_key_values is None
    logits, kept = model.eval()(ids, return_dict=False)
    assert logits.shape == (2, 9, 61)
    assert isinstance(kept, KVMDistCache)
    model.config.use_cache = False
    assert model(ids).past_key_values is None
    assert isinstance(model(ids, use_cache=True).past_key_values, KVMDistCache)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input_ids": None, "inputs_embeds": torch.ones(2, 9, 32)}, "inputs_embeds: not supported"),
        ({"output_attentions": True}, "output_attentions: not supported"),
        ({"output_hidden_states": True}, "output_hidden_states: not supported"),
        ({"position_ids": torch.arange(9)}, "position_ids: not supported"),
        ({"input_ids": None}, "input_ids: got None"),
        ({"cache": KVMDistCache(), "past_key_values": KVMDistCache()}, "two names of one thing"),
        ({"attention_mask": torch.ones(2, 8)}, r"attention_mask: got \[2, 8\], wanted \[2, 9\]"),
        ({"attention_mask": torch.ones(2, 1, 9, 9)}, r"attention_mask: got \[2, 1, 9, 9\]"),
        ({"labels": torch.ones(2, 8)}, r"labels: got \[2, 8\]"),
        ({"labels": torch.ones(2, 9), "logits_to_keep": 1}, "labels need the whole sequence"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_the_model_cannot_follow_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        face("rwkv7")(**{"input_ids": tiny_batch(9)[0]} | given)


def test_a_configuration_that_contradicts_itself_is_refused() -> None:
    dump = tiny_config(["kvm"]).model_dump(mode="json")
    assert KVMDistConfig(dump).model_config == tiny_config(["kvm"])
    assert KVMDistConfig(dump, vocab_size=37).vocab_size == 37
    with pytest.raises(ValueError, match=r"vocab_size=38 contradicts model\.vocab_size=37"):
        KVMDistConfig(dump, vocab_size=38)
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        KVMDistConfig(dump, tie_word_embeddings=True)
    with pytest.raises(ValueError, match="slots_per_head"):
        KVMDistConfig(dump | {"slots_per_head": 3})


def test_a_new_model_depends_on_the_global_seed_alone() -> None:
    config = KVMDistConfig(tiny_config(["kvm", "rwkv7"]))
    models = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        models.append(KVMDistForCausalLM(config).state_dict())

    assert all(torch.equal(z, models[1][name]) for name, z in models[0].items())
    assert not torch.equal(models[0]["backbone.head.weight"], models[2]["backbone.head.weight"])


@pytest.mark.parametrize("family", ["all kinds", "recurrences"])
def test_checkpointed_activations_are_computed_again_in_the_backward(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, labels = tiny_batch(29)
    plain, again = face(family).train(), face(family).train()
    repeated: list[int] = []

    def counted(*arguments: Any, **named: Any) -> Any:
        repeated.append(1)
        return torch.utils.checkpoint.checkpoint(*arguments, **named)

    monkeypatch.setattr(segment, "checkpoint", counted)
    again.gradient_checkpointing_enable()
    assert again.is_gradient_checkpointing
    again(ids, labels=labels).loss.backward()
    often = len(repeated)
    plain(ids, labels=labels).loss.backward()
    for (name, ours), theirs in zip(again.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name
    again.gradient_checkpointing_disable()
    again(ids, labels=labels)
    assert not again.is_gradient_checkpointing
    assert len(repeated) == often >= 2 * len(again.backbone.layers)


@pytest.mark.parametrize("family", ["all kinds", "recurrences"])
def test_autocast_rounds_matrices_and_no_state(family: str) -> None:
    ids, labels = tiny_batch(70)
    exact, rounded, half = (face(family).train() for _ in range(3))
    expected = exact(ids, labels=labels)
    with torch.autocast("cpu", torch.bfloat16):
        found = rounded(ids, labels=labels)
    others = (found, half.bfloat16()(ids, labels=labels))
    for output in (expected, *others):
        output.loss.backward()

    assert 0 < (found.logits - expected.logits).abs().max() <= 0.01 * expected.logits.abs().max()
    first, *gradients = (
        torch.cat([p.grad.flatten() for p in model.parameters()]).float() for model in (exact, rounded, half)
    )
    errors = [(gradient - first).norm() / first.norm() for gradient in gradients]
    assert errors[0] < 0.6 * errors[1], "no nearer than a model in bfloat16"


def test_a_resized_vocabulary_keeps_the_known_ids() -> None:
    model = face("kvm/rwkv7")
    ids = tiny_batch(9)[0]
    before = model(ids).logits
    model.resize_token_embeddings(40)

    assert model.config.model_config.vocab_size == model.backbone.config.vocab_size == 40
    after = model(ids).logits
    assert after.shape[-1] == 40
    assert torch.equal(after[..., :37], before)
    loss = model.backbone(ids, WholeSequence(), ids, 4)
    assert loss.item() == pytest.approx(token_losses(after, ids)[0].item(), rel=1e-6)
