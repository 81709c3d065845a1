"""What tokens spell, and where a text ends that was asked to stop at strings or patterns.

A text ends with the first token after which it holds a stop string, or matches a pattern (SGLang's documentation of
`stop` and `stop_regex`; a pattern is one of Python's `re`). This module must not look at a trace.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.contract.requests import RequestSpec

FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Where a text ends: its first `length` tokens, by any of `matched`. at: where the string that ends it begins and
    ends in the text, None for a pattern, which is never cut off.
    """

    length: int
    matched: tuple[str, ...]
    at: tuple[int, int] | None


class Spelling:
    """The tokenizer of a folder."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer  # here, since few runs spell anything

        self.content = (folder / FILE).read_text()
        self._tokenizer = Tokenizer.from_str(self.content)

    def text(self, tokens: Sequence[int], *, special: bool = True) -> str:
        """special: with the texts of special tokens, such as EOS, which an answer leaves out."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=not special))

    def one(self, text: str) -> int | None:
        """The token that stands for a text, None where it takes several."""
        ids = self.ids(text)
        return ids[0] if len(ids) == 1 else None

    def ids(self, text: str) -> list[int]:
        """Tokens that spell a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    @property
    def added(self) -> tuple[int, ...]:
        """Tokens that stand for something else than their text."""
        return tuple(self._tokenizer.get_added_tokens_decoder())

    def plain(self, ends: Sequence[int]) -> str:
        """The tokenizer's file, all tokens but those that end a request standing for their text alone; the file as it
        is where its vocabulary is not one by text, or lacks one of them."""
        made = json.loads(self.content)
        vocab, added = made["model"].get("vocab"), made.get("added_tokens", [])
        kept = [one for one in added if one["id"] in ends]
        if not isinstance(vocab, dict) or not {one["content"] for one in added} <= vocab.keys():
            return self.content
        return json.dumps({**made, "added_tokens": kept})

    def stop(self, request: RequestSpec, output: Sequence[int]) -> Stop | None:
        """Where an output ends by the request's strings and patterns, None if by none of them."""
        if not request.ends_by_text:
            return None
        for length in range(1, len(output) + 1):
            text = self.text(output[:length])
            strings = [one for one in request.stop if one in text]
            patterns = [one for one in request.stop_regex if re.search(one, text)]
            if strings or patterns:
                begin = min(map(text.find, strings), default=0)
                first = next((one for one in strings if text.find(one) == begin), "")
                at = (begin, begin + len(first)) if strings else None
                return Stop(length=length, matched=(*strings, *patterns), at=at)
        return None

    def answered(
        self, request: RequestSpec, output: Sequence[int], stop: Stop | None, *, ends: Sequence[int] = ()
    ) -> str:
        """The text that comes back of an output: without the stop string or token, or up to it where that is kept.

        ends: the tokens that end the request.
        """
        ended = stop is None and len(output) > 0 and output[-1] in ends and not request.no_stop_trim
        text = self.text(output[: len(output) - ended], special=False)
        if stop is None or stop.at is None:
            return text
        cut = text.find(stop.matched[0]) if len(stop.matched) == 1 else stop.at[0]
        return text[: cut + (stop.at[1] - stop.at[0]) * request.no_stop_trim]
