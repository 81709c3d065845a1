"""How much is kept of what is too large to travel: the largest logits of a row, and sums of a recurrent state's values.

Both sides: NumPy only. Each value has a weight of its own in every sum: a state that is another one anywhere has other
sums.
"""

from __future__ import annotations

import functools

import numpy as np

#: How many of the largest logits a row keeps (fewer if the vocabulary is smaller).
TOP_LOGITS = 16
#: Sums of each head's matrix, and of each row that a short convolution keeps.
OF_A_HEAD, OF_A_ROW = 2, 8


@functools.cache
def weights(count: int, size: int) -> np.ndarray:
    """float32 [count,size]: waves of as many frequencies, so that no two sums are near each other."""
    places, waves = np.arange(1, size + 1, dtype=np.float64), np.arange(1, count + 1, dtype=np.float64)
    return np.cos(np.outer(waves * 0.7548776662466927, places) + waves[:, None]).astype(np.float32)
