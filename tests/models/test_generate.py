import pytest
import torch

from models.generate import generate
from parallel.sequence.context import WholeSequence
from tests.models.tiny import HYBRID, tiny_batch, tiny_model
from tests.support.live_bytes import LiveBytes


def test_greedy_text_is_what_whole_forwards_choose() -> None:
    model = tiny_model(HYBRID)
    prompt = tiny_batch(21)[0][0]
    ids = generate(model, prompt, tokens=30, temperature=0, generator=torch.Generator())

    text = prompt
    for _ in range(30):
        with torch.no_grad():
            text = torch.cat([text, model(text.unsqueeze(0), WholeSequence())[0, -1:].argmax(-1)])
    assert torch.equal(ids, text[len(prompt) :])


def test_sampling_depends_on_its_generator_and_leaves_the_global_one_alone() -> None:
    model = tiny_model(["rwkv7"])
    prompt = tiny_batch(5)[0][0]
    before = torch.get_rng_state()
    texts = [generate(model, prompt, 20, 1.0, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]

    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


def test_a_prompt_is_read_without_logits_of_all_its_tokens() -> None:
    model, prompt = tiny_model(["kvm", "rwkv7"], vocab_size=8192), tiny_batch(700)[0][0]
    with LiveBytes() as reading:
        generate(model, prompt, 2, 0, torch.Generator())
    assert reading.peak < 4 * 8192 * len(prompt) / 4


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        generate(tiny_model(["rwkv7"]), torch.empty(0, dtype=torch.int64), 3, 0, torch.Generator())
