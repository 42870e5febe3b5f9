from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kvm_dist.config import RunConfig
from kvm_dist.data.loader import MicroBatch
from kvm_dist.exit_codes import DataError
from kvm_dist.step import TrainStep
from models.loss import IGNORED_LABEL


def test_a_batch_without_a_token_to_learn_from_is_refused_before_the_engine_sees_it() -> None:
    split: Any = SimpleNamespace(
        device=torch.device("cpu"), inputs=lambda tokens, number: tokens, labels=lambda labels, number: labels
    )
    step = TrainStep(RunConfig(), cast(Any, None), [], split)
    masked = MicroBatch(torch.zeros(2, 8, dtype=torch.int64), torch.full((2, 8), IGNORED_LABEL))
    with pytest.raises(DataError, match=r"step 5: every token of the batch is masked.*data check"):
        step([masked, masked], 4, stop_requested=False)
