"""MappedWeights: finds the parameters of a checkpoint's keys by a map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmdeploy_llm.weights.map import Target, WeightMap


class MappedWeights:
    """The part of a model that says where its weights go. weight_map: keys of checkpoints ->
    parameters; a model sets it, or overrides `weight_targets`."""

    weight_map: WeightMap

    def weight_targets(self, key: str) -> Sequence[Target] | None:
        """Returns what `weight_map` says of a key; see weights.map."""
        return self.weight_map.targets(key)
