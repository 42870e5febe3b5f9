"""`plot` of a sweep: a table of its runs, best first, and a picture."""

from pathlib import Path

from rich.markup import escape
from rich.table import Table

from kvm_dist.plots.sweep import sweep_ranking
from kvm_dist.sweep_results import read_members
from launch.console import table_console


def compare(folder: Path) -> None:
    """Print the table, write `sweep.png`, and say where it is."""
    varied, members = read_members(folder)
    table = Table("run", *varied, "step", "training loss", "validation loss", box=None, pad_edge=False)
    for member in members:
        losses = (member.training_loss, member.validation_loss)
        table.add_row(
            escape(member.path.name),
            *map(escape, member.values),
            str(member.step),
            *("" if loss is None else f"{loss:.4f}" for loss in losses),
        )
    table_console().print(table)
    print(sweep_ranking(folder.name, varied, members, folder / "sweep.png"))
