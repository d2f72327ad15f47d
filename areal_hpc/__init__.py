"""AReaL as a Slurm-native batch system: asynchronous reinforcement learning in one MPI world."""

__version__ = "0.1.0"
