"""A scheduler step waits for grammars that threads compile, on a pretended SGLang."""

import threading
import types
from concurrent.futures import Future, ThreadPoolExecutor

from harness.engine_side.hooks import HookRegistry
from harness.engine_side.host import grammars


def pretended(*queue):
    """SGLang's module and its manager, whose poll looks once and waits for nothing."""

    class GrammarManager:
        def __init__(self):
            self.grammar_queue = [types.SimpleNamespace(grammar=grammar) for grammar in queue]

        def get_ready_grammar_requests(self):
            return [req for req in self.grammar_queue if not isinstance(req.grammar, Future) or req.grammar.done()]

    module = types.SimpleNamespace(__name__="grammar_manager", GrammarManager=GrammarManager)
    grammars.install(HookRegistry(), module)
    return GrammarManager()


def test_every_grammar_that_is_being_compiled_is_ready_at_the_poll():
    asked = threading.Event()
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(lambda: asked.wait(0.05) or "compiled")  # longer than a poll that waits for nothing
        manager = pretended(pool.submit(str), slow)
        assert len(manager.get_ready_grammar_requests()) == 2
    assert slow.result() == "compiled"


def test_one_that_never_is_leaves_the_decision_to_sglang(monkeypatch):
    monkeypatch.setattr(grammars, "COMPILE_SECONDS", 0.01)
    assert pretended(Future()).get_ready_grammar_requests() == []


def test_requests_that_were_aborted_and_those_that_failed_are_not_waited_for():
    failed = Future()
    failed.set_exception(ValueError("no grammar"))
    assert len(pretended(None, failed).get_ready_grammar_requests()) == 2
