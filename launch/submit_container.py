"""What the ranks of a job see of the disk when they run in a container. Imports no torch."""

from collections.abc import Iterable
from pathlib import Path

from kvm_dist.config import RunConfig
from kvm_dist.slurm_config import ContainerConfig


def hidden_folders(config: RunConfig) -> list[Path]:
    """Those that the ranks need and that no mount shows under the name they have outside."""
    container = config.slurm.container
    if container is None:
        return []
    shown = list(_shown(container))
    needed = [config.run_directory, config.data.path, Path.cwd()]
    missing = [path.absolute() for path in needed if not _is_below(path.absolute(), shown)]
    return list(dict.fromkeys(missing))


def mounts_problem(config: RunConfig) -> str | None:
    """A container may show more than it is told to, as its site has set it up: this is advice."""
    if not (hidden := hidden_folders(config)):
        return None
    mounts = ", ".join(f"{path}:{path}" for path in hidden)
    return f"the container may not show the ranks all they need; add to slurm.container.mounts: {mounts}"


def _shown(container: ContainerConfig) -> Iterable[Path]:
    for mount in container.mounts:
        source, _, rest = mount.partition(":")
        target = rest.partition(":")[0] or source
        if source == target:
            yield Path(source)
    if container.runtime == "apptainer":
        yield from (Path.home(), Path.cwd(), Path("/tmp"))


def _is_below(path: Path, folders: Iterable[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)
