"""Data sets: reading formats (`jsonl`, `columnar`, `directories`), what fields mean (`layouts`), the order (`order`).

Only the controller reads prompts; `chat` is for rollout ranks, `survey` for `areal-hpc check`. Nothing here needs torch
or a network, no script of a data set is run, nothing is unpickled.
"""

from areal_hpc.data.order import Mixture, PromptSource, Source
from areal_hpc.data.prompts import DatasetError, Prompt

__all__ = ["DatasetError", "Mixture", "Prompt", "PromptSource", "Source"]
