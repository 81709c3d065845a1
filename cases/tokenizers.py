"""Tokenizers for the tiny pairs: a short text for each of a pair's ids, byte for byte the same on every machine.

Characters come first, then texts of several, so that the ends of tokens and those of grammar symbols or stop strings
differ. Any text over the characters can be spelled, in more ways than one. It must not import a tokenizer library.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from cases.folders import made_once
from harness.contract.scenario import Scenario
from harness.engines import envs

FILE = "tokenizer.json"
#: What lies beside a target with another kind of tokenizer.
OTHERS = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "tiktoken.model")
#: What a reasoning model writes around its thoughts, as SGLang's `reasoning_parser` "qwen3" knows it.
THINK, THINK_END = "<think>", "</think>"
BOS, EOS = "<s>", "</s>"
BYTES = {"add_prefix_space": False, "trim_offsets": False}
CHARACTERS = f"{string.printable[:95]}\n"
#: Texts that grammars are made of, and what they begin with.
JOINED = ('{"', '"}', '":', '": ', '",', '", ', '", "', ", ", ": ", "[]", "tr", "tru", "true", "nu", "nul", "null")


def texts(vocab: int) -> list[str]:
    """The text of each id but the last two, which are the pair's BOS and EOS."""
    room = vocab - 2
    special = [THINK, THINK_END] if room > len(CHARACTERS) else []
    plain = list(dict.fromkeys([*CHARACTERS, *JOINED, *_runs()]))
    return [*plain[: room - len(special)], *special]


def _runs() -> Iterator[str]:
    """Two digits, two letters, three letters: enough for any vocabulary of ours."""
    for letters, length in (("0123456789", 2), ("etaoinshrd", 2), ("etaoinshrd", 3)):
        yield from map("".join, product(letters, repeat=length))


def _spelled(text: str) -> str:
    """As byte-level BPE writes it; other printable bytes stand for themselves."""
    return text.replace(" ", "Ġ").replace("\n", "Ċ")


def tokenizer_for(scenario: Scenario, target: Path) -> Path | None:
    """The folder of the tokenizer that a scenario's engine is given: the target's own, or one made for it.

    None where it is given none, and where the target has one of another kind, which nothing here reads.
    """
    if scenario.engine.skip_tokenizer_init:
        return None
    if (target / FILE).exists():
        return target
    if any((target / name).exists() for name in OTHERS):
        return None
    config, root = json.loads((target / "config.json").read_text()), envs.home() / "checkpoints"
    return make(vocab=config["vocab_size"], bos=config["bos_token_id"], eos=config["eos_token_id"], root=root)


def make(*, vocab: int, bos: int, eos: int, root: Path) -> Path:
    """The folder with the tokenizer for `vocab` ids, made if absent."""

    def fill(folder: Path) -> None:
        for name, content in _files(vocab, bos, eos).items():
            (folder / name).write_text(json.dumps(content, ensure_ascii=True, indent=1, sort_keys=True) + "\n")

    return made_once(root / f"tokenizer-{vocab}-{bos}-{eos}", fill)


def _files(vocab: int, bos: int, eos: int) -> dict[str, dict[str, Any]]:
    ids = [number for number in range(vocab) if number not in (bos, eos)]
    known = dict(zip(map(_spelled, texts(vocab)), ids, strict=True))
    merges = [[text[:-1], text[-1]] for text in known if len(text) > 1 and text not in (THINK, THINK_END)]
    added = {BOS: (bos, True), EOS: (eos, True)} | {
        text: (known[text], False) for text in (THINK, THINK_END) if text in known
    }
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        FILE: {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", **BYTES, "use_regex": False},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", **BYTES, "use_regex": False},
            "added_tokens": [
                {"id": number, "content": text, "special": special, **plain}
                for text, (number, special) in sorted(added.items(), key=lambda item: item[1])
            ],
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": known | {BOS: bos, EOS: eos},
                "merges": merges,
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 1 << 20,
        },
    }
