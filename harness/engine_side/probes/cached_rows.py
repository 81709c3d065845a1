"""Whether rows of the KV cache are still what was written there: the engine's own cache, compared with itself.

A wrong row in the cache shows in whatever attends it, rows later. So each forward notes the bits of what it writes in
the layer that is looked at, and the next ones compare those of the slots that they read. No row is kept: one number
stands for its bits.

Engine side: torch only. It must not write to the cache. It knows of forwards alone: whoever else may write, as what is
moved or arrives does, must be told of by `lost`, or it would look like damage.
"""

from __future__ import annotations

import torch


class CachedRows:
    """Of each layer's buffer, by where it lies in memory: the bits of its rows, and which of these are known."""

    def __init__(self) -> None:
        self._bits: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        #: the same of what was copied to the host
        self._host: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def forget(self) -> None:
        """Nothing is known any more: another scenario begins."""
        self._bits, self._host = {}, {}

    def changed(
        self, buffers: tuple[torch.Tensor, torch.Tensor], written: torch.Tensor, read: torch.Tensor
    ) -> torch.Tensor:
        """Of slots that are read, int64 [w], whether each holds something else than was written: bool [w].

        buffers: keys and values of a layer, which now hold `written` too. What has changed is said once.
        """
        bits, known = self._of(buffers)
        bits[written], known[written] = _bits(buffers, written), True
        inside = (read >= 0) & (read < len(bits))  # whoever judges what is read finds the others
        read, found = read[inside], torch.zeros_like(inside)
        now = _bits(buffers, read)
        found[inside] = known[read] & (bits[read] != now)
        bits[read], known[read] = now, True
        return found

    def lost(self, buffers: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor) -> None:
        """Somebody else may write here before they are read."""
        self._of(buffers)[1][slots] = False

    def stored(self, host: torch.Tensor, device: torch.Tensor) -> None:
        """Rows of every layer that is known are copied to the host, int64 [w] each."""
        for place, (bits, known) in self._bits.items():
            own = self._host.get(place)
            if own is None or int(host.max()) >= len(own[0]):
                size = int(host.max()) + 1
                more = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.bool)
                if own is not None:
                    more[0][: len(own[0])], more[1][: len(own[1])] = own
                own = self._host[place] = more
            own[0][host], own[1][host] = bits[device], known[device]

    def loaded(self, host: torch.Tensor, device: torch.Tensor) -> None:
        """The opposite: on the device is what the host had been given."""
        for place, (bits, known) in self._host.items():
            own = self._bits[place]
            own[0][device], own[1][device] = bits[host], known[host]

    def _of(self, buffers: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        place, size = buffers[0].data_ptr(), len(_rows(buffers[0]))
        if place not in self._bits:
            self._bits[place] = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.bool)
        return self._bits[place]


def _rows(buffer: torch.Tensor) -> torch.Tensor:
    """[slots, heads, d], whatever pages there are."""
    return buffer.flatten(0, -3)


def _bits(buffers: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
    """int64 [w]: the sum of the bits of each slot's keys and values, taken as whole numbers."""
    whole = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
    parts = [_rows(buffer)[slots].flatten(1).contiguous() for buffer in buffers]
    sums = [part.view(whole[part.element_size()]).sum(dim=1, dtype=torch.int64) for part in parts]
    return sums[0] + 3 * sums[1]
