"""Pictures of a run. The only room that imports matplotlib."""

from kvm_dist.plots.position import position_loss
from kvm_dist.plots.run import loss_curve, plot_run

__all__ = ["loss_curve", "plot_run", "position_loss"]
