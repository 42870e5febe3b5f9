"""How a run is started: the command line, local processes and Slurm."""
