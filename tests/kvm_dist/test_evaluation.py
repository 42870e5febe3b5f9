from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kvm_dist.config import EvaluationConfig
from kvm_dist.data.loader import MicroBatch
from kvm_dist.data.tokenizer import build_tokenizer
from kvm_dist.evaluate.session import Evaluation
from kvm_dist.exit_codes import NotFinite
from kvm_dist.run_directory import RunDirectory
from models.backbone import Backbone
from tests.models.tiny import tiny_batch, tiny_model
from tests.support.one_rank import whole_sequences

TOKENS = 32


def evaluation_of(model: Backbone, folder: Path) -> Evaluation:
    return Evaluation(
        EvaluationConfig(validation_sequences=1),
        cast(Any, SimpleNamespace(module=model)),
        model,
        cast(Any, [MicroBatch(*tiny_batch(TOKENS))]),
        whole_sequences(model.config, TOKENS),
        build_tokenizer("bytes"),
        RunDirectory(folder),
    )


def test_a_validation_loss_that_is_not_finite_ends_the_run_before_the_save(tmp_path: Path) -> None:
    model = tiny_model(["kvm"])
    assert evaluation_of(model, tmp_path).run(1)["validation/loss"] > 0

    with torch.no_grad():
        model.head.weight[0, 0] = torch.nan
    with pytest.raises(NotFinite, match=r"step 2: the validation loss is nan.*from the last checkpoint"):
        evaluation_of(model, tmp_path).run(2)
