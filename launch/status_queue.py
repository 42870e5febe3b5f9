"""This user's jobs in Slurm's queue, in one question. Imports no torch."""

import getpass
from dataclasses import dataclass

from kvm_dist.slurm_queue import ENDED, WAITING, ask_queue


@dataclass(frozen=True)
class QueuedJob:
    """number: as `123`, or `123_4` of an array. state: Slurm's word. reason: why it waits."""

    number: str
    state: str
    nodes: str = ""
    reason: str = ""

    @property
    def waits(self) -> bool:
        return self.state in WAITING

    @property
    def runs(self) -> bool:
        return not self.waits and self.state not in ENDED


def queued_jobs() -> dict[str, QueuedJob]:
    """By number; empty where there is no Slurm or it does not answer."""
    ended = ask_queue("--array", "--user", getpass.getuser(), "--format=%i|%T|%N|%r")
    if ended is None:
        return {}
    fields = (line.split("|") for line in ended.stdout.splitlines())
    jobs = (QueuedJob(*(part.strip() for part in parts)) for parts in fields if len(parts) == 4)
    return {job.number: job for job in jobs}
