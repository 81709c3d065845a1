"""One request alone, speculating with layers that draft a token each; see `reference.alone` for its turns.

Rows are written at its end, once all windows are known. This module must not look at a trace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from harness.contract.trace import RoundRecord
from harness.contract.types import Phase, RequestSpec
from reference.mtp import Window
from reference.stories import where_of
from reference.tree import chain_tree
from reference.turns import Conditions
from reference.writer import Where, Writer

if TYPE_CHECKING:
    from reference.mtp_session import MtpSession


class LayersAlone:
    """One request speculating with layers that draft a token each; rows are written once all windows are known."""

    drafts = 0

    def __init__(self, session: MtpSession, request: RequestSpec, writer: Writer) -> None:
        self._session, self._writer, self._request = session, writer, request
        self.layers, self._windows = session.spec.k, list[Window]()
        self.tokens, self._prompt = list(request.prompt), len(request.prompt)
        self.tokens.append(int(self._logits(self._forward()[-1]).argmax()))
        self._hidden = self._forward()

    def _forward(self) -> torch.Tensor:
        return self._session.target.forward(torch.tensor(self.tokens))

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._session.target.logits(hidden)

    def chunk(self, where: Where, length: int, *, final: bool) -> None:
        start, stop = where.committed, where.committed + length
        self._session.prompt_rows(self._writer, where, self.tokens, self._hidden, length)
        guess = None if final or not self._session.guesses else int(self._logits(self._hidden[stop - 1]).argmax())
        self._windows.append(Window(start=start, stop=stop, known=self._prompt + final, guess=guess))

    def decode(self, where: Where) -> int:
        session, c = self._session, where.committed
        self._windows = session.depths(self.tokens, self._hidden, self._windows)[1]
        chain = chain_tree(self.tokens[c], self._windows[-1].proposals)
        (walk,) = session.verify_rounds(self._writer, self.tokens, [(where, chain, Conditions())])
        self.tokens += walk.tokens
        self._hidden = self._forward()
        stop = c + len(walk.tokens)
        self._windows.append(Window(start=c, stop=stop, known=stop + 1))
        return len(walk.tokens)

    def close(self, records: list[RoundRecord]) -> None:
        depths, windows = self._session.depths(self.tokens, self._hidden, self._windows)
        for record, window in zip(records, windows, strict=True):
            phase = Phase.DRAFT_PREFILL if record.mode == "PREFILL" else Phase.EXTEND
            where = where_of(record, rid=self._request.rid, epoch=0, committed=window.start)
            self._session.layer_rows(self._writer, where, phase, depths, window)
