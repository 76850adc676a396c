"""PackedPairs: the packed matrices of experts, two of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from .base import Kernels, PackedWeight
from .mixtures import Mixture


class PackedPairs:
    """Holds gate and up of each expert as one packed matrix, and down as another. is_in_file: set
    where they are pages of a file, see Kernels.mixture."""

    _packed: list[tuple[PackedWeight, PackedWeight]] | None = None
    is_in_file = False
    _mixtures: dict[torch.dtype, Mixture | None]  # of all experts, by the dtype of x

    def take_pairs(
        self, gate_up: Iterable[PackedWeight | None], down: Iterable[PackedWeight | None]
    ) -> None:
        """Takes the packed matrices of all experts."""
        self._packed, self._mixtures = [], {}
        for one, other in zip(gate_up, down, strict=True):
            assert one is not None and other is not None  # noqa: PT018 - can_pack was True
            self._packed.append((one, other))

    def replace(self, expert: int, packed: PackedWeight, *, is_down: bool) -> None:
        """Puts another matrix in the place of one."""
        assert self._packed is not None, "there is one"
        gate_up, down = self._packed[expert]
        self._packed[expert] = (gate_up, packed) if is_down else (packed, down)
        self._mixtures = {}

    def mixture(
        self,
        kernels: Kernels,
        sizes: tuple[int, int],
        dtype: torch.dtype,
        biases: Callable[[int], tuple[Tensor | None, Tensor | None]],
    ) -> Mixture | None:
        """Returns all experts in one call; see Kernels.mixture. biases: of an expert."""
        if self._packed is None:
            return None
        if dtype not in self._mixtures:
            own = [biases(expert) for expert in range(len(self._packed))]
            self._mixtures[dtype] = kernels.mixture(
                self._packed, sizes, dtype, own, is_in_file=self.is_in_file
            )
        return self._mixtures[dtype]

    def packed_parts(self) -> Mapping[str, PackedWeight]:
        """Returns the packed matrices by names."""
        found: dict[str, PackedWeight] = {}
        for expert, (gate_up, down) in enumerate(self._packed or ()):
            found |= {f"{expert}.gate_up": gate_up, f"{expert}.down": down}
        return found

    def take_packed(self, parts: Mapping[str, PackedWeight]) -> None:
        """Takes what `packed_parts` of an equal layer returned."""
        experts = range(len(parts) // 2)
        self.take_pairs(
            [parts[f"{expert}.gate_up"] for expert in experts],
            [parts[f"{expert}.down"] for expert in experts],
        )
