"""How a training step scales over sequence ranks: counted, calibrated, replayed, measured, extrapolated."""
