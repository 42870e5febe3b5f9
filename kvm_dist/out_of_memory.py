"""A device whose memory is full, as an end that says what would hold less. Imports no torch."""

from kvm_dist.exit_codes import CrashError


def out_of_memory(error: Exception, rank: int) -> CrashError:
    """What to end with. error: the library's, whose first sentence says how much it wanted."""
    wanted = str(error).splitlines()[0]
    return CrashError(
        f"rank {rank}: {wanted} What holds less: a higher train.accumulation, parallel.sequence or "
        "parallel.zero_stage, train.loss_chunk=1024, model.activation_checkpointing=true; `kvm-dist plan` "
        "says how much a rank holds at its fullest"
    )
