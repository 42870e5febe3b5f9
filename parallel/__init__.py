"""How work is split: world, mesh, collectives, sequence transport, engine. Knows tensors, no model."""
