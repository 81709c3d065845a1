"""What a user types wrong for a benchmark is one message, and 2 or 3; nothing of it runs here."""

import importlib
import sys

import pytest

from benchmarks._bench import ended

WRONG = [
    ("noise --sizes x", "allowed: hidden x layers"),
    ("noise --sizes 64x2,", "allowed: hidden x layers"),
    ("noise --rows 0", "a whole number from 1 on"),
    ("cost --repeats 0", "a whole number from 1 on"),
    ("cost --engine 9.9", "no SGLang 9.9 is published"),
    ("images --chunk -1", "a whole number from 1 on"),
    ("indexer --make /proc/x", "cannot write"),
    ("make_real_size /proc/x --device cpu", "cannot write"),
    ("make_real_size FOLDER --only llama-2b", "allowed: llama-1b, qwen3-4b, llama-8b"),
    ("make_real_size FOLDER --device zzz", "choose from"),
    ("pairs FOLDER", "no pairs there"),
    ("pairs FOLDER --engine 0.5.23", "no pairs there"),
    ("pipeline --seconds x", "invalid float value"),
    ("routing FOLDER/none", "no such folder"),
    ("witness --folder FOLDER/none", "no such folder"),
    ("witness --json FOLDER/none/x.json", "none"),
]


@pytest.mark.parametrize(("typed", "said"), WRONG, ids=[typed for typed, _ in WRONG])
def test_a_slip_is_one_message(typed, said, tmp_path, monkeypatch, capsys):
    name, *words = typed.replace("FOLDER", str(tmp_path)).split()
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    with pytest.raises(SystemExit) as stop:
        ended(importlib.import_module(f"benchmarks.{name}").main)
    assert stop.value.code in (2, 3)
    assert said in capsys.readouterr().err
