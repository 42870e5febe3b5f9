"""Whether the warning before a time limit leaves enough time to save."""

from pathlib import Path

from kvm_dist.metrics import parse_record

_TAIL_BYTES = 262_144
MARGIN = 1.25  # for a step or a save slower than those measured


def lead_problem(metrics_path: Path, lead_seconds: int) -> str | None:
    """What is wrong with `lead_seconds`, by the steps and saves of a run so far; None if nothing is."""
    measured = _measured(metrics_path)
    if measured is None:
        return None
    step, save = measured
    if MARGIN * (step + save) <= lead_seconds:
        return None
    return (
        f"a step takes {step:.0f} s and a save {save:.0f} s, but the signal comes {lead_seconds} s before "
        "the time limit: the save may be cut off; set slurm.signal_seconds="
        f"{round(2 * (step + save)) + 1} or more"
    )


def _measured(metrics_path: Path) -> tuple[float, float] | None:
    """The longest step and save among the last ones, in seconds; None before the first save."""
    try:
        with open(metrics_path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None
    records = [record for line in lines if (record := parse_record(line)) is not None]
    saves = [float(r["checkpoint/save_seconds"]) for r in records if "checkpoint/save_seconds" in r]
    steps = [float(r["perf/step_seconds"]) for r in records if "perf/step_seconds" in r]
    return (max(steps, default=0.0), max(saves)) if saves else None
