"""How work is split: world, mesh, collectives, sequence transport and the training engine. Knows tensors, no model."""
