"""A job whose ranks count instead of training: all of Slurm's part of a run, in seconds."""

import os
import sys
from pathlib import Path

from tests.launch.slurm_run import SlurmRun

# Takes the place of a container's runtime, and so of the ranks' program.
STAND_IN = """#!{python}
import os, sys, time
sys.path.insert(0, {root!r})
import launch.slurm_rank as slurm_rank
from kvm_dist.exit_codes import CrashError, Preempted
from kvm_dist.load import load_config
from kvm_dist.signals import StopRequest

def count(config, placement):
    should_stop = StopRequest().install()
    folder = load_config(config).config.run_directory
    path = folder / f"counted-{{placement.rank}}"
    (folder / f"pid-{{placement.rank}}").write_text(str(os.getpid()))
    counted = int(path.read_text()) if path.exists() else 0
    while not (folder / "finish").exists():
        time.sleep(0.1)
        counted += 1
        path.write_text(str(counted))
        if (folder / "crash").exists():
            raise CrashError("told to crash")
        if should_stop():
            raise Preempted("stopped as asked")

slurm_rank._train = count
sys.argv[:] = sys.argv[sys.argv.index("launch.slurm_rank"):]
slurm_rank.main()
"""
ROOT = Path(__file__).parents[2]


class CountingRun(SlurmRun):
    """Two ranks on two nodes that count until `finish` appears, from where they were stopped."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, root)
        program = root / "bin" / "apptainer"
        program.parent.mkdir()
        program.write_text(STAND_IN.format(python=sys.executable, root=str(ROOT)))
        program.chmod(0o755)
        (root / "text").mkdir()
        for number in range(3):
            (root / "text" / f"{number}.txt").write_text(f"some words of {number}\n" * 50)

    def submit(self, *overrides: str) -> None:
        super().submit("slurm.container={runtime: apptainer, image: none}", *overrides)

    def environment(self) -> dict[str, str]:
        """The stand-in is found by the PATH that the job inherits."""
        return super().environment() | {"PATH": f"{self.root / 'bin'}:{os.environ['PATH']}"}

    def counted(self, rank: int) -> int:
        path = self.directory / f"counted-{rank}"
        return int(path.read_text() or 0) if path.exists() else 0

    def wait_until_counted(self, count: int) -> None:
        self.wait(f"count of {count}", lambda: min(self.counted(0), self.counted(1)) >= count)

    def pid(self, rank: int) -> int:
        return int((self.directory / f"pid-{rank}").read_text())

    def codes(self) -> list[int | None]:
        """How the attempts ended."""
        from kvm_dist.attempts import read_attempts

        return [attempt.code for attempt in read_attempts(self.directory)]
