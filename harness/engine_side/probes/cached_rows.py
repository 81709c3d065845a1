"""Whether rows of the KV cache are still what was written there: the engine's own cache, compared with itself.

A wrong row in the cache shows in whatever attends it, rows later. So each forward notes the bits of what it writes in
the layer that is looked at, and the next ones compare those of the slots that they read. No row is kept: one number
stands for its bits.

Engine side: torch only. It must not write to the cache. It knows of forwards alone: whoever else may write, as what is
moved or arrives does, must be told of by `lost`, or it would look like damage.
"""

from __future__ import annotations

from collections import defaultdict

import torch


class CachedRows:
    """Of each layer's buffer, by where it lies in memory: the bits of its rows, and which of these are known."""

    def __init__(self) -> None:
        #: on the device, and of what was copied to the host and to storage behind it
        self._held: dict[str, dict[int, tuple[torch.Tensor, torch.Tensor]]] = defaultdict(dict)

    def forget(self) -> None:
        """Nothing is known any more: another scenario begins."""
        self._held.clear()

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

    def copied(self, source: str, rows: torch.Tensor, target: str, to: torch.Tensor) -> None:
        """Rows of every layer, int64 [w], went from "device", "host" or "storage" to another of them."""
        for place, (bits, known) in self._held[source].items() if len(to) else ():
            own = self._held[target].get(place, (bits[:0], known[:0]))
            if (more := int(to.max()) + 1 - len(own[0])) > 0:
                own = torch.cat([own[0], bits.new_zeros(more)]), torch.cat([own[1], known.new_zeros(more)])
            self._held[target][place] = own
            there = rows < len(bits)
            own[1][to] = False  # of what never went to the source nothing is known
            own[0][to[there]], own[1][to[there]] = bits[rows[there]], known[rows[there]]

    def _of(self, buffers: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        place, size = buffers[0].data_ptr(), len(_rows(buffers[0]))
        if place not in self._held["device"]:
            self._held["device"][place] = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.bool)
        return self._held["device"][place]


def _rows(buffer: torch.Tensor) -> torch.Tensor:
    """[slots, heads, d], whatever pages there are."""
    return buffer.flatten(0, -3)


def _bits(buffers: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
    """int64 [w]: the sum of the bits of each slot's keys and values, taken as whole numbers."""
    whole = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
    parts = [_rows(buffer)[slots].flatten(1).contiguous() for buffer in buffers]
    sums = [part.view(whole[part.element_size()]).sum(dim=1, dtype=torch.int64) for part in parts]
    return sums[0] + 3 * sums[1]
