"""Engines on a Ray cluster: LLMWorker and caption_dataset for Ray Data, ClusterLLM for a batch.

    rows, blocks    columns of a dataset -> prompts -> columns; a block of prompts -> its answers
    deaths          which rows were being computed when a process died
    sizes           what an engine takes of a machine
    cluster         the only file that imports ray: actors, the pool, the dataset

Needs the extra `ray` (ray[data]) on every machine of the cluster.
"""

from .cluster import ClusterLLM, LLMWorker, caption_dataset, connect
from .rows import Columns

__all__ = ["ClusterLLM", "Columns", "LLMWorker", "caption_dataset", "connect"]
