"""Copies of what was sent are kept for two micro-batches, however many a step or a validation has."""

from tests.kvm_dist.layout_case import Layout, kept_bytes
from tests.support.ranks import Ranks


def test_what_was_sent_is_kept_until_the_next_micro_batch_ends() -> None:
    layout = Layout(sequence=2, accumulation=5, sequences=5, layers=("kvm", "rwkv7", "full_attention"))
    with Ranks(2) as ranks:
        found = ranks.run(kept_bytes, layout)
    for of_step, of_validation in found:
        assert of_step == [of_step[0], *[2 * of_step[0]] * 4]
        assert of_validation == [of_validation[0], *[2 * of_validation[0]] * 4]
    assert found[0][0][0] > 0
