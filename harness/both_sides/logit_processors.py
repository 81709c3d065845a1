"""The custom logit processors that a scenario may name, and what both sides know of them.

SGLang takes a pickled class; a scenario is data, so it names one of ours. Each is a mask over the vocabulary, so that
nothing depends on whether it comes before or after penalties and bias. Standard library only.
"""

from __future__ import annotations

from typing import Literal

#: forbid: its tokens are never chosen. force: only its tokens are ever chosen.
Processor = Literal["forbid", "force"]

#: The key of a request's custom_params that holds the token ids it speaks of.
PARAMETER = "token_ids"
