"""A real Slurm of two nodes on this machine's loopback: `python -m tests.support.slurm_cluster start`.

Verbs: install (Debian packages, as root), start, stop, status, environment. Each may be repeated. There is
no slurmdbd, so `sacct` fails here, as on many clusters.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
FOLDER = Path(tempfile.gettempdir()) / f"kvm-dist-slurm-{os.getuid()}"
CONFIG = FOLDER / "slurm.conf"
KEY, SOCKET = FOLDER / "munge.key", FOLDER / "munge.socket"
NODES = ("node1", "node2")
CONTROLLER_PORT, FIRST_NODE_PORT = 16817, 17001
START_SECONDS = 90.0  # of a machine with other work

TEMPLATE = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmctldParameters=enable_configless
AuthType=auth/munge
AuthInfo=socket={socket}
CredType=cred/munge
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,bf_interval=2,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=20
ReturnToService=2
SlurmdTimeout=10
UnkillableStepTimeout=60
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
NodeName=node[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2 RealMemory=8000
PartitionName=main Nodes=node[1-2] Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=node[1-2] MaxTime=60 State=UP PriorityTier=2
"""


def environment() -> dict[str, str]:
    """What a Slurm command needs to reach this cluster."""
    return {**os.environ, "SLURM_CONF": str(CONFIG)}


def installed() -> bool:
    return all(_program(name) for name in ("slurmctld", "slurmd", "munged", "srun"))


def missing() -> str:
    """For people: why tests of this cluster cannot run; empty when they can."""
    if not installed():
        return (
            "no Slurm on this machine: `python -m tests.support.slurm_cluster start` installs one (as root)"
        )
    if not running():
        return "the loopback Slurm does not run: `python -m tests.support.slurm_cluster start`"
    return ""


def running() -> bool:
    """Whether the controller answers."""
    if not CONFIG.exists():
        return False
    return "UP" in output("scontrol", "ping")


def install() -> None:
    if installed():
        return
    if os.getuid() != 0 or shutil.which("apt-get") is None:
        raise SystemExit(f"no Slurm here, and only root on Debian can install it: {' '.join(PACKAGES)}")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update", "-qq"], check=True, env=quiet)
    command = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", *PACKAGES]
    subprocess.run(command, check=True, env=quiet)


def start() -> None:
    """Install, configure and start what does not run yet; returns when both nodes are ready."""
    install()
    for folder in (FOLDER, FOLDER / "state", *(FOLDER / f"spool-{node}" for node in NODES)):
        folder.mkdir(mode=0o755, exist_ok=True)
    _start_munge()
    last = FIRST_NODE_PORT + len(NODES) - 1
    CONFIG.write_text(
        TEMPLATE.format(
            host=socket.gethostname().split(".")[0],
            controller_port=CONTROLLER_PORT,
            socket=SOCKET,
            folder=FOLDER,
            first=FIRST_NODE_PORT,
            last=last,
        )
    )
    if not running():
        _daemon("slurmctld", "-i")
    for node in NODES:
        start_node(node)
    _wait_until_ready()


def start_node(node: str) -> None:
    """Start the node's daemon unless it runs."""
    if node_pid(node) is None:
        _daemon("slurmd", "-N", node)


def kill_node(node: str) -> None:
    """What a power cut does: the daemon and everything it started die at once.

    Steps have daemons of their own. A rank that outlives its node's daemon is ended when that is back, after
    KillWait seconds and with all of its job: what was started again by then dies with it. Slurm lets two
    minutes pass before it starts a job again; tests do not.
    """
    daemon = node_pid(node)
    log = str(FOLDER / f"{node}.log")  # all that a step's daemon has of the node's
    steps = [step for step in _processes("slurmstepd") if log in _open_files(step)]
    roots = [daemon, *steps] if daemon is not None else steps
    doomed = [process for root in roots for process in [*_descendants(root), root]]
    for process in doomed:
        _kill(process, signal.SIGKILL)
    for process in doomed:
        _wait_for_end(process)


def return_to_service(node: str) -> None:
    """What an administrator does with a node that was down."""
    output("scontrol", "update", f"nodename={node}", "state=down", "reason=rebooted")
    output("scontrol", "update", f"nodename={node}", "state=resume")


def node_pid(node: str) -> int | None:
    return _alive(FOLDER / f"{node}.pid")


def stop() -> None:
    """Cancel all jobs, then end the daemons; what was started here only."""
    if not CONFIG.exists():
        return
    if running():
        subprocess.run([_program("scancel"), "--state=RUNNING"], env=environment(), check=False)
        subprocess.run([_program("scancel"), "--state=PENDING"], env=environment(), check=False)
    for node in NODES:
        kill_node(node)
    for name in ("slurmctld", "munged"):
        if (pid := _alive(FOLDER / f"{name}.pid")) is not None:
            _kill(pid, signal.SIGTERM)
            _wait_for_end(pid)
    shutil.rmtree(FOLDER, ignore_errors=True)


def _start_munge() -> None:
    if _alive(FOLDER / "munged.pid") is not None:
        return
    if not KEY.exists():
        descriptor = os.open(KEY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(1024))
    command = [_program("munged"), "--force", f"--key-file={KEY}", f"--socket={SOCKET}"]
    command += [f"--pid-file={FOLDER}/munged.pid", f"--log-file={FOLDER}/munged.log"]
    command += [f"--seed-file={FOLDER}/munge.seed"]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def _daemon(name: str, *arguments: str) -> None:
    command = [_program(name), "-f", str(CONFIG), *arguments]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, env=environment())


def _wait_until_ready() -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        states = output("sinfo", "-h", "-N", "-p", "main", "-o", "%t").split()
        if len(states) == len(NODES) and all(state in ("idle", "mix", "alloc") for state in states):
            return
        time.sleep(0.5)
    raise SystemExit(f"the nodes are not ready in {START_SECONDS:g} s; see {FOLDER}/*.log")


def output(*command: str) -> str:
    """What a Slurm command of this cluster says."""
    ended = subprocess.run(
        [_program(command[0]), *command[1:]], env=environment(), capture_output=True, text=True, check=False
    )
    return ended.stdout


def _program(name: str) -> str:
    """Its path, also where a person's PATH leaves out the folders of daemons; empty if there is none."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or ""


def _alive(pid_file: Path) -> int | None:
    try:
        pid = int(pid_file.read_text())
        os.kill(pid, 0)
    except (OSError, ValueError):
        return None
    return pid


def _kill(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _wait_for_end(pid: int, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)


def _processes(name: str) -> list[int]:
    """Pids whose program is called `name`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "comm").read_text().strip() == name:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def _open_files(pid: int) -> list[str]:
    found = []
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed just now
                found.append(os.readlink(link))
    return found


def _descendants(pid: int) -> list[int]:
    """All processes below `pid`, deepest last."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children += [int(child) for child in task.read_text().split()]
        except OSError:
            continue
    return [*children, *(below for child in children for below in _descendants(child))]


def main(arguments: Sequence[str]) -> None:
    verbs = {"install": install, "start": start, "stop": stop}
    verb = arguments[0] if arguments else ""
    if verb in verbs:
        verbs[verb]()
    elif verb == "environment":
        print(f"export SLURM_CONF={CONFIG}")
    elif verb == "status":
        print(missing() or output("sinfo"))
    else:
        raise SystemExit(f"wanted one of: {' '.join([*verbs, 'status', 'environment'])}")


if __name__ == "__main__":
    main(sys.argv[1:])
