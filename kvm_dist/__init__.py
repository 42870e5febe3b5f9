"""The training system: run config, data, optimiser, trainer, checkpoints, tracking, evaluation, plots."""
