"""Settings of published models that are rarely other than usual."""

import pytest
import torch

from models.backbone import Backbone
from models.config import BlockWindowConfig, SlidingWindowConfig
from models.costs import model_costs
from models.layers.attention import AttentionMixer
from parallel.sequence.context import WholeSequence
from tests.models.test_messages import assert_as_listed
from tests.models.tiny import tiny_batch, tiny_config, tiny_model

LAYERS = ["sliding_window", "block_window"]


def test_a_kind_turns_by_its_own_rotary_base() -> None:
    ids, _ = tiny_batch(40)
    changed = SlidingWindowConfig(window=8, rotary_base=50.0)
    model = tiny_model(LAYERS, sliding_window=changed)
    bases = [
        block.mixer.projections.rotary_base
        for block in model.layers
        if isinstance(block.mixer, AttentionMixer)
    ]
    assert bases == [50.0, 10_000.0]
    both = tiny_model(
        LAYERS, sliding_window=changed, block_window=BlockWindowConfig(chunk=8, rotary_base=50.0)
    )
    common = tiny_model(LAYERS, block_window=BlockWindowConfig(chunk=8), rotary_base=50.0)
    logits = [m(ids, WholeSequence()) for m in (model, both, common)]
    assert torch.equal(logits[1], logits[2])
    assert not torch.allclose(logits[0], logits[1])


@pytest.mark.parametrize(("attention", "feed_forward"), [(True, False), (False, True)])
def test_the_feed_forward_part_shifts_tokens_or_not_by_itself(attention: bool, feed_forward: bool) -> None:
    switches = {"token_shift": attention, "feed_forward_shift": feed_forward}
    config = tiny_config(LAYERS, **switches)
    names = {name for name, _ in Backbone(config).named_parameters()}
    assert any("feed_forward.shift" in name for name in names) == feed_forward
    assert any("mixer.projections.shifts" in name for name in names) == attention
    assert model_costs(config, 64).parameters == sum(p.numel() for p in Backbone(config).parameters())
    assert_as_listed(tiny_model(LAYERS, **switches), [0, 32, 64, 93], batch=1)
