"""The configuration of a run."""

from areal_hpc.config.data import DataConfig, PrepareConfig
from areal_hpc.config.job import ComponentConfig
from areal_hpc.config.reward import RewardConfig
from areal_hpc.config.root import Config, load_resolved
from areal_hpc.config.simulation import SimulationConfig
from areal_hpc.config.trainer import TrainerConfig

__all__ = [
    "ComponentConfig",
    "Config",
    "DataConfig",
    "PrepareConfig",
    "RewardConfig",
    "SimulationConfig",
    "TrainerConfig",
    "load_resolved",
]
