"""PackedPairs: the packed matrices of experts, two of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mmdeploy_llm.kernels import PackedWeight


class PackedPairs:
    """Holds gate and up of each expert as one packed matrix, and down as another."""

    _packed: list[tuple[PackedWeight, PackedWeight]] | None = None

    def take_pairs(
        self, gate_up: Iterable[PackedWeight | None], down: Iterable[PackedWeight | None]
    ) -> None:
        """Takes the packed matrices of all experts."""
        self._packed = []
        for one, other in zip(gate_up, down, strict=True):
            assert one is not None and other is not None  # noqa: PT018 - can_pack was True
            self._packed.append((one, other))

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
