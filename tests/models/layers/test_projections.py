"""Queries, keys and values are handed over one by one, those first that others wait for."""

import pytest
import torch
from torch import Tensor, nn

from models.layers.attention import AttentionMixer
from parallel.sequence.context import WholeSequence
from tests.models.tiny import tiny_model


@pytest.mark.parametrize("recomputes", [False, True])
def test_keys_are_ready_before_queries_are_normed(recomputes: bool) -> None:
    model = tiny_model(["kvm"], activation_checkpointing=recomputes)
    mixer = next(one for one in model.modules() if isinstance(one, AttentionMixer))
    projections, log = mixer.projections, list[str]()
    for name in ("norm_key", "norm_query"):
        norm: nn.Module = getattr(projections, name)
        norm.register_forward_pre_hook(lambda *_, name=name: log.append(name))

    def ready(name: str, tensor: Tensor) -> Tensor:
        log.append(name)
        return 2 * tensor

    x = torch.randn(1, 32, model.config.hidden_size)
    first = projections.first_value(x)
    plain = projections(x, first, WholeSequence())
    log.clear()
    taken = projections(x, first, WholeSequence(), ready)
    assert log == ["norm_key", "key", "value", "norm_query", "query"]
    for one, wanted in zip(taken, plain, strict=True):
        assert torch.equal(one, 2 * wanted)
