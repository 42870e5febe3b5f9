"""Long trials of a real run, too long for every test run; each ends with code 1 if a bit differs.

python -m tests.support.soak slurm --steps 200 --faults 6 --seed 0    random faults on two Slurm nodes
python -m tests.support.soak saves --kills 20 --seed 0                kills at random instants of a save

The first needs the loopback cluster: python -m tests.support.slurm_cluster start.
"""

import argparse
import multiprocessing
import os
import random
import signal
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from kvm_dist.attempts import read_attempts
from kvm_dist.checkpoint import newest_valid
from kvm_dist.load import load_config
from kvm_dist.run_directory import RunDirectory, open_run_directory
from launch.ending import exit_code_of, leave
from launch.joined import write_log
from tests.launch.slurm_run import SlurmRun, rank_pids, slurm
from tests.launch.tiny_run import TinyRun, write_corpus
from tests.support import slurm_cluster

FAULTS = ("signal", "rank 0 killed", "rank 1 killed", "rank 0 stopped", "rank 1 stopped", "node2 lost")
LONGEST_SECONDS = 1800  # of a local run
HANG_SECONDS = 30  # parallel.timeout_seconds: how long a stopped rank is waited for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("trial", choices=("slurm", "saves"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--faults", type=int, default=6)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory(prefix="kvm-dist-soak-") as name:
        folder = Path(name)
        write_corpus(folder)
        if given.trial == "slurm":
            same = soak(folder, given.steps, given.faults, rng)
        else:
            same = kill_saves(folder, given.kills, rng)
    print("the same bits as an undisturbed run" if same else "DIFFERENT from an undisturbed run")
    raise SystemExit(not same)


def soak(folder: Path, steps: int, faults: int, rng: random.Random) -> bool:
    """Let `faults` random faults befall a submitted run of `steps` steps, and wait for its end."""
    if problem := slurm_cluster.missing():
        raise SystemExit(problem)
    long = [f"train.steps={steps}", "checkpoint.every_steps=10", "evaluation.every_steps=50"]
    undisturbed = TinyRun(folder / "undisturbed", folder)
    undisturbed.train(long)
    run = SlurmRun(folder / "soak", folder)
    begun = time.monotonic()
    run.submit(*long, f"parallel.timeout_seconds={HANG_SECONDS}")
    try:
        every = steps // faults  # one fault in each such stretch: never three without a checkpoint in between
        for first in range(0, every * faults, every):
            run.wait_for_step(first + rng.randrange(2, every - 2))
            fault = rng.choice(FAULTS)
            print(f"after step {run.reached():4d}  {fault:16s}", end="", flush=True)
            strike(run, fault)
            if over(run):
                print("  comes too late: the run is over")
                break
            run.start_again_now()
            print(f"  restarts {run.restarts()}, ends {[a.code for a in read_attempts(run.directory)]}")
        run.wait_for_end(start_again=True)
    finally:
        run.cancel()
        run.wait_for_end()
    if not over(run):
        codes = [attempt.code for attempt in read_attempts(run.directory)]
        raise SystemExit(f"the job left the queue before the run was over: ends {codes}\n{run.output()}")
    seconds = time.monotonic() - begun
    metrics = run.metrics()
    productive = sum(line["perf/step_seconds"] for line in metrics)
    share, own = productive / seconds, metrics[-1]["fault/goodput"]
    print(f"{steps} steps in {seconds:.0f} s, of which {productive:.0f} s in steps that count")
    print(f"goodput {share:.2f}, of the last attempt alone {own:.2f}")
    return same_end(run, undisturbed)


def strike(run: SlurmRun, fault: str) -> None:
    """Returns once the job can be queued again."""
    if fault == "signal":
        slurm("scancel", "--signal=USR2", run.job)
    elif fault == "node2 lost":
        run.lose_node("node2")
    else:
        _, rank, how = fault.split()
        number = signal.SIGKILL if how == "killed" else signal.SIGSTOP
        for pid in rank_pids(int(rank), run.directory):
            os.kill(pid, number)


def over(run: SlurmRun) -> bool:
    """Whether the newest start has ended well: Slurm itself may not know it yet."""
    return [attempt.code for attempt in read_attempts(run.directory)][-1:] == [0]


def kill_saves(folder: Path, kills: int, rng: random.Random) -> bool:
    """Kill one or both ranks at random instants of saves, and start the run again each time."""
    overrides = [f"train.steps={3 * kills}", "checkpoint.every_steps=1", "evaluation.every_steps=1000"]
    undisturbed, run = TinyRun(folder / "undisturbed", folder), TinyRun(folder / "killed", folder)
    end_all(start_ranks(undisturbed, overrides))
    saves = [
        line["checkpoint/save_seconds"] for line in undisturbed.metrics() if "checkpoint/save_seconds" in line
    ]
    duration = statistics.median(saves)
    reached = complete = unfinished = 0
    for number in range(kills):
        known = set(partial_folders(run))
        ranks = start_ranks(run, overrides)
        partial = wait_for_partial(run, reached + 1, known)
        time.sleep(rng.uniform(0, duration))
        doomed = rng.choice(((0,), (1,), (0, 1)))
        for rank in doomed:
            ranks[rank].kill()
        end_all(ranks)
        left = partial.exists()
        newest = newest_valid(run.directory / "checkpoints")
        step = newest.step if newest else 0
        complete += step >= reached
        unfinished += left
        how = "left unfinished" if left else "finished"
        print(
            f"{number + 1:3d}  ranks {doomed} killed in the save of {partial.name[:13]}, {how}; newest {step}"
        )
        reached = step
    end_all(start_ranks(run, overrides))
    print(f"{complete} of {kills} kills left a complete newest checkpoint; {unfinished} left a partial one")
    return complete == kills and same_end(run, undisturbed)


def start_ranks(run: TinyRun, overrides: Sequence[str]) -> list[BaseProcess]:
    """The two ranks of `run`, forked from a process that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.rank_imports", "kvm_dist.train"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    open_run_directory(load_config(run.config, overrides))
    arguments = [(rank, port, run.config, overrides) for rank in range(2)]
    ranks = [context.Process(target=train_rank, args=given) for given in arguments]
    for rank in ranks:
        rank.start()
    return ranks


def train_rank(rank: int, port: int, config: Path, overrides: Sequence[str]) -> None:
    place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    loaded = load_config(config, overrides)
    write_log(RunDirectory(loaded.config.run_directory), rank)
    from kvm_dist.train import train

    leave(exit_code_of(lambda: train(loaded)))


def end_all(ranks: Sequence[BaseProcess]) -> None:
    """Wait until all have ended: after a kill the other rank ends by itself."""
    for rank in ranks:
        rank.join(LONGEST_SECONDS)
        if rank.exitcode is None:
            raise SystemExit(f"a rank still runs after {LONGEST_SECONDS} s")


def partial_folders(run: TinyRun) -> Iterator[Path]:
    return (run.directory / "checkpoints").glob("*.partial-*")


def wait_for_partial(run: TinyRun, step: int, known: set[Path]) -> Path:
    """The folder that a save of `step` or a later one has just begun, none of the `known`."""
    found: list[Path] = []

    def begun() -> bool:
        new = set(partial_folders(run)) - known
        found[:] = [path for path in new if int(path.name[5:13]) >= step]
        return bool(found)

    wait_until(begun)
    return found[0]


def same_end(run: TinyRun, undisturbed: TinyRun) -> bool:
    return run.final_bytes() == undisturbed.final_bytes() and run.losses() == undisturbed.losses()


def wait_until(true: Callable[[], bool], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise SystemExit("waited for too long")
        time.sleep(0.001)


if __name__ == "__main__":
    main()
