"""Hosts that are copied from a process which has imported everything: what they share, and what is their own."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from cases.processes import survivors
from harness.engines import engine, templates
from harness.engines.engine import EngineError, Launch
from harness.engines.templates import Template, Templates, can_copy, kind_of

ROOT = Path(__file__).resolve().parents[2]
#: Stands in for the engine host: what it would import is a name in its environment; a copy says who it is and ends.
HOST = f"""
import json, os, socket, sys, tempfile
sys.path.insert(0, {str(ROOT)!r})
from harness.engine_side.host.template import copied

def prepare(boot):
    os.environ["IMPORTED"] = boot["word"]
    if boot["word"] == "broken":
        raise ImportError("no such module")
    return [os.getpid(), tempfile.gettempdir()]

assert sys.argv[1] == "template"
path, (imported_by, _) = copied(socket.socket(fileno=int(sys.argv[2])), prepare)
print("written by a copy", flush=True)
told = {{"pid": os.getpid(), "session": os.getsid(0), "folder": os.getcwd(), "temporary": tempfile.gettempdir()}}
told |= {{"imported_by": imported_by, "chance": __import__("random").random(), "environment": dict(os.environ)}}
with open(path + ".part", "w") as file:
    json.dump(told, file)
os.rename(path + ".part", path)
os._exit(7)
"""


@pytest.fixture
def launch(tmp_path, monkeypatch):
    (tmp_path / "host.py").write_text(HOST)
    monkeypatch.setattr(engine, "_HOST", tmp_path / "host.py")
    boot = {"copies": True, "word": "yes", "environment": {"A": "1"}, "arguments": {"k": 3}, "flags": []}
    return Launch(python=Path(sys.executable), pythonpath=(), boot=boot)


@pytest.fixture
def template(launch, tmp_path):
    made = Template(launch, tmp_path / "template.log")
    yield made
    made.close()


def copy(template, folder, name, **environment):
    """(what a copy told, its process), once it has ended; it must be waited for by whoever asks."""
    place = folder / name
    (place / "tmp").mkdir(parents=True)
    given = {"TMPDIR": str(place / "tmp"), "PATH": os.environ["PATH"], **environment}
    template.ready(given)
    copied = template.copy(str(place / "told"), log=place / "log", environment=given)
    assert copied.wait(timeout=20) == 7
    return json.loads((place / "told").read_text()), copied


def test_copies_share_what_was_imported_and_nothing_of_each_others_surroundings(template, tmp_path):
    one, _ = copy(template, tmp_path, "one", MINE="one", OURS="both")
    two, _ = copy(template, tmp_path, "two", ALSO="two", OURS="both")
    assert one["imported_by"] == two["imported_by"] not in (one["pid"], two["pid"], os.getpid())
    assert one["chance"] != two["chance"]
    for name, told in (("one", one), ("two", two)):
        assert told["session"] == told["pid"]
        assert told["folder"] == str(tmp_path / name)
        assert told["temporary"] == told["environment"]["TMPDIR"] == str(tmp_path / name / "tmp")
        assert told["environment"]["IMPORTED"] == "yes"
        assert told["environment"]["OURS"] == "both"
        assert (tmp_path / name / "log").read_text() == "written by a copy\n"
    assert ("MINE" in one["environment"], "MINE" in two["environment"], "ALSO" in two["environment"]) == (1, 0, 1)


def test_how_a_copy_ended_can_be_read_by_others_until_it_is_waited_for(template, tmp_path):
    place = tmp_path / "one"
    place.mkdir()
    template.ready(dict(os.environ))
    copied = template.copy(str(place / "told"), log=place / "log", environment=dict(os.environ))
    watched = psutil.Process(copied.pid)
    assert survivors([watched]) == []
    assert copied.poll() == copied.poll() == 7
    assert watched.status() == psutil.STATUS_ZOMBIE
    assert copied.wait(timeout=5) == 7
    assert not psutil.pid_exists(copied.pid)


def test_a_template_ends_with_whoever_holds_it_and_leaves_no_folder(template, tmp_path):
    template.ready(dict(os.environ))
    process, folder = psutil.Process(template._process.pid), Path(template._folder.name)
    assert folder.is_dir()
    template._orders.close()  # as when this process ends
    assert survivors([process]) == []
    template.close()
    assert not folder.exists()


def test_what_cannot_be_imported_is_an_error_that_names_the_log(launch, tmp_path):
    broken = replace(launch, boot={**launch.boot, "word": "broken"})
    made = Template(broken, tmp_path / "template.log")
    with pytest.raises(EngineError, match=r"SGLang could not be imported .*its log: .*template\.log"):
        made.ready(dict(os.environ))
    assert "ImportError: no such module" in (tmp_path / "template.log").read_text()
    assert made._process is None


def test_a_template_that_was_killed_is_an_error_and_not_a_wait(template, tmp_path):
    template.ready(dict(os.environ))
    template._process.kill()
    with pytest.raises(EngineError, match="the process that engines are copied from is gone"):
        template.copy(str(tmp_path / "told"), log=tmp_path / "log", environment=dict(os.environ))


def test_one_template_serves_its_kind_and_another_kind_gets_one_of_its_own(launch, tmp_path):
    kept = Templates(tmp_path)
    other_arguments = replace(launch, boot={**launch.boot, "arguments": {"k": 1}})
    other_environment = replace(launch, boot={**launch.boot, "environment": {"A": "2"}})
    assert kind_of(launch) == kind_of(other_arguments) != kind_of(other_environment)
    first = kept.engine(launch, tmp_path / "1.log").template
    assert kept.engine(other_arguments, tmp_path / "2.log").template is first
    first.ready(dict(os.environ))
    process = psutil.Process(first._process.pid)
    assert kept.engine(other_environment, tmp_path / "3.log").template is not first
    assert survivors([process]) == []
    assert kept.started == 2
    kept.close()


@pytest.mark.parametrize("told", [{"copies": False}, {"lease": {"share": 4}}, {"handoff": {"side": "decode"}}])
def test_what_differs_before_the_imports_is_not_copied(launch, told):
    assert can_copy(launch)
    assert not can_copy(replace(launch, boot={**launch.boot, **told}))
    assert not can_copy(replace(launch, ranks=2))


def test_every_part_of_a_boot_record_that_seams_look_at_makes_a_kind():
    """What `LATER` leaves out is read nowhere before everything is imported, but for whether there are ranks."""
    seams = (ROOT / "harness" / "engine_side" / "host" / "seams.py").read_text()
    assert [name for name in templates.LATER if f'boot["{name}"]' in seams] == ["arguments"]
    assert seams.count('boot["arguments"]') == seams.count('boot["arguments"]["enable_dp_attention"]') == 1
