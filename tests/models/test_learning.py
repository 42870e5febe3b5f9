"""New models, as the published initialisation leaves them, learn."""

import math

import pytest
import torch

from models.backbone import Backbone
from models.initialise import initialise
from models.loss import token_losses
from models.parameter_groups import parameter_groups
from parallel.sequence.context import WholeSequence
from tests.models.tiny import tiny_config

VOCABULARY, TOKENS, STEPS = 37, 48, 120


@pytest.mark.parametrize("layers", [["rwkv7"], ["kvm"], ["kvm", "rwkv7"]], ids=str)
def test_a_new_model_learns_two_random_sequences_by_heart(layers: list[str]) -> None:
    model = Backbone(tiny_config(layers))
    initialise(model, seed=0)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [parameters[name] for name in group.names], "lr": 2e-2 * group.learning_rate_scale}
            for group in parameter_groups(model)
        ],
        betas=(0.9, 0.95),
        weight_decay=0.0,
    )
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCABULARY, (2, TOKENS + 1), generator=generator)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total, valid = token_losses(model(ids[:, :-1], WholeSequence()), ids[:, 1:])
        (total / valid).backward()
        optimizer.step()
        losses.append(float(total.detach() / valid))

    assert losses[0] == pytest.approx(math.log(VOCABULARY), abs=0.5)
    assert losses[-1] < 0.05
