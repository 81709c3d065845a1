"""What a decode side asks of its release's own code: labelled as no engine's doing, and no part of a verdict."""

from types import SimpleNamespace

import torch

from harness.engine_side.host import draft_input_builder
from harness.engines import component


def asked(build):
    """The answers of a release whose builder of draft inputs is this."""
    scheduler = SimpleNamespace(
        device="cpu", model_config=None, spec_algorithm=SimpleNamespace(build_disagg_draft_input=build)
    )
    scheduler.server_args = "settings"
    return draft_input_builder.answers(scheduler)


def test_a_builder_is_asked_with_what_its_release_lets_it_have():
    seen = []

    def older(batch, server_args, last_tokens_tensor, future_map):
        seen.append((len(batch.reqs), server_args, last_tokens_tensor.shape[0], batch.enable_overlap))
        return torch.stack([one.hidden_states_tensor for one in batch.reqs])

    found = asked(older)
    assert seen == [
        (2, "settings", 2, False),
        (0, "settings", 0, False),
        (1, "settings", 1, False),
        (2, "settings", 2, False),
    ]
    assert found["two requests"] == {"outcome": "built", "what": "Tensor"}
    assert [found[case]["error"].split(":")[0] for case in ("no request", "no hidden state", "one of two without")] == [
        "RuntimeError", "TypeError", "TypeError",
    ]  # fmt: skip
    assert asked(lambda batch, future_map: None)["no request"] == {"outcome": "no draft input"}


ANSWERS = {
    "two requests": {"outcome": "built", "what": "EagleDraftInput"},
    "no request": {"outcome": "raises", "error": "RuntimeError: empty", "site": "srt/x.py:build"},
    "plugin": {"outcome": "no draft input"},
}


def test_answers_are_labelled_and_say_where_it_raises():
    handshake = {"release": "0.5.13", "component": ANSWERS}
    first, *lines = component.notes(handshake)
    assert "no part of the verdict" in first
    assert [line.split()[0] for line in lines] == ["two", "no", "plugin"]
    assert "srt/x.py:build" in lines[1]
    document = component.document(handshake)["component"]
    assert document == {"level": "component", "release": "0.5.13", "answers": ANSWERS}
    alone = {"release": "0.5.13"}
    assert (component.notes(alone), component.document(alone)) == ([], {}), "an engine of one side was asked nothing"
