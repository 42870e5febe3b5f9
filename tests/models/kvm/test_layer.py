"""The operator inside its layer: used twice in a step, and on as many threads as it was given."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from parallel.sequence.context import WholeSequence
from tests.models.kvm.cases import assert_close
from tests.models.tiny import tiny_batch, tiny_model


@pytest.mark.parametrize("recompute", [False, True])
def test_a_layer_that_is_used_twice_in_a_step_gets_both_gradients(recompute: bool) -> None:
    model = tiny_model(["kvm"], activation_checkpointing=recompute).double()
    batches = [tiny_batch(tokens)[0] for tokens in (75, 40)]

    def loss(ids: Tensor) -> Tensor:
        logits: Tensor = model(ids, WholeSequence())
        return logits.square().mean()

    def gradients() -> dict[str, Tensor]:
        found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
        model.zero_grad()
        return found

    each = []
    for ids in batches:
        loss(ids).backward()
        each.append(gradients())
    torch.stack([loss(ids) for ids in batches]).sum().backward()
    assert_close(gradients(), {name: each[0][name] + each[1][name] for name in each[0]}, 1e-12)


THREADS = """
import os, sys, torch
torch.set_num_threads(int(sys.argv[1]))
from models.kvm import FixedBudget
from tests.models.kvm.cases import random_case
case = random_case(1000, batch=2, heads=4, width=32, chunk=64, budget=FixedBudget(slots=200))
before = len(os.listdir("/proc/self/task"))
case.run("torch")
sys.exit(100 + len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
@pytest.mark.parametrize("threads", [1, 3])
def test_the_operator_starts_no_more_threads_than_it_was_given(threads: int) -> None:
    run = subprocess.run([sys.executable, "-c", THREADS, str(threads)], check=False)
    assert run.returncode == 100 + threads - 1
