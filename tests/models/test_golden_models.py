import pytest
import torch

from models.loss import token_losses
from parallel.sequence.context import WholeSequence
from tests.models.golden import golden_model

FAMILIES = ["bswa", "gptalpha", "kvm_sqrt", "kvm_swa", "ovq_swa", "rwkv7"]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_loss_and_every_gradient_equal_the_authors(name: str, recompute: bool) -> None:
    golden = golden_model(name, activation_checkpointing=recompute)
    logits = golden.model(golden.input_ids, WholeSequence())
    total, valid = token_losses(logits, golden.labels)
    loss = total / valid
    loss.backward()

    assert (logits - golden.logits).abs().max() <= 1e-5
    assert (loss - golden.loss).abs().max() <= 1e-5
    gradients = {parameter: p.grad for parameter, p in golden.model.named_parameters()}
    assert gradients.keys() == golden.gradients.keys()
    allowed = 2e-6 * max(z.abs().max() for z in golden.gradients.values())
    for parameter, expected in golden.gradients.items():
        found = gradients[parameter]
        assert found is not None, parameter
        assert torch.isfinite(found).all(), parameter
        assert (found - expected).abs().max() <= allowed, parameter
