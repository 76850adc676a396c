"""Makes one channel of several: their mean, as transformers and soundfile's users take it.

Where channels cancel each other, as those of a microphone whose wires were swapped, nothing would
be left of what a person hears: there the louder channel stands for all. Where each channel is to be
heard alone, none is made.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mmdeploy_llm.errors import MediaError, MediaLimitError

MAX_CHANNELS = 64
MOST_APART = 8  # channels that are kept apart: those of 7.1, and of recorders of meetings
BLOCK = 2**14  # samples that are mixed in one way
# Of the energy that a mean of independent channels has: less is left where they are opposite.
CANCELLED = 0.01
QUIET = 1e-4  # root mean square of a channel that counts as silent
MUCH_LOUDER = 4.0  # in energy: from which on the channel that is heard changes


class Apart:
    """Keeps the channels of one sound apart, block by block."""

    def __init__(self) -> None:
        self._num_channels: int | None = None

    def taken(self, channels: np.ndarray) -> np.ndarray:
        """Returns the channels as they are. channels: float32 [channels, samples]. Raises
        MediaLimitError for more than MOST_APART, MediaError where there are more or less than
        before."""
        number = len(channels)
        if not 0 < number <= MOST_APART:
            raise MediaLimitError(
                f"the sound has {number} channels, of which {MOST_APART} at most can be kept apart"
            )
        if self._num_channels not in (None, number):
            raise MediaError(
                f"the sound has {self._num_channels} channels first and {number} later, which "
                "cannot be kept apart; mix them"
            )
        self._num_channels = number
        return channels

    def notes(self) -> Iterator[str]:
        """Yields nothing: nothing is mixed."""
        return iter(())


class Mixer:
    """Mixes the channels of one sound, block by block.

    num_samples, num_cancelled: samples that were mixed, and those of them that are one channel's.
    channel: the one that is heard there, from 0.
    """

    def __init__(self) -> None:
        self.num_samples = self.num_cancelled = 0
        self.channel: int | None = None

    def taken(self, channels: np.ndarray) -> np.ndarray:
        """Returns `mixed` as [1, samples]."""
        return self.mixed(channels)[None]

    def mixed(self, channels: np.ndarray) -> np.ndarray:
        """Returns one channel. channels: float32 [channels, samples]. Raises MediaLimitError for
        more than MAX_CHANNELS."""
        num_channels, num_samples = channels.shape
        if not 0 < num_channels <= MAX_CHANNELS:
            raise MediaLimitError(
                f"the sound has {num_channels} channels, {MAX_CHANNELS} are allowed; mix it"
            )
        self.num_samples += num_samples
        if num_channels == 1:
            only: np.ndarray = channels[0]
            return only
        # From eight on numpy adds in another order, which depends on how they lie.
        own = channels if num_channels < 8 else np.ascontiguousarray(channels.T).T
        mean: np.ndarray = own.mean(axis=0)
        for begin in range(0, num_samples, BLOCK):
            part = slice(begin, begin + BLOCK)
            self._mend(channels[:, part], mean[part])
        return mean

    def notes(self) -> Iterator[str]:
        """Yields what a listener should know."""
        if self.channel is not None:
            share = self.num_cancelled / self.num_samples
            where = (
                "" if share > 0.995 else f" in {share:.0%} of it" if share > 0.01 else " in parts"
            )
            yield (
                f"its channels are opposite{where} and cancel each other: channel "
                f"{self.channel + 1} alone is heard there"
            )

    def _mend(self, channels: np.ndarray, mean: np.ndarray) -> None:
        """Writes the louder channel into a mean of opposite ones."""
        energies = np.einsum("cs,cs->c", channels, channels)
        expected = float(energies.sum()) / len(energies) ** 2
        loudest = int(energies.argmax())
        if float(mean @ mean) >= CANCELLED * expected:
            return
        if float(energies[loudest]) <= QUIET**2 * len(mean):
            return
        if self.channel is None or energies[loudest] > MUCH_LOUDER * energies[self.channel]:
            self.channel = loudest
        self.num_cancelled += len(mean)
        mean[:] = channels[self.channel]
