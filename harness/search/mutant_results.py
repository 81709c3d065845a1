"""What became of mutants of SGLang's source, in files: a plan, what the scenarios show without one, a line a mutant.

Records and their folder. It must not drive an engine, and must not import torch.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from enum import StrEnum
from os import SEEK_END
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.archive.faults import room
from harness.contract.scenario import Scenario
from harness.contract.usage import UsageError

PLAN, SOUND, RESULTS = "plan.json", "sound.jsonl", "results.jsonl"
#: What older campaigns call their results.
OLD_RESULTS = "fates.jsonl"
#: Survivors that somebody looked at and explained.
EXPLAINED = Path(__file__).with_name("survivors.toml")

Count = Annotated[int, Field(ge=0)]
Record = TypeVar("Record", bound=BaseModel)


class Status(StrEnum):
    """Of a mutant."""

    KILLED = "KILLED"
    SURVIVED = "SURVIVED"
    UNKNOWN = "UNKNOWN"  # no FAIL, but no PASS either
    ERROR = "ERROR"  # something of ours failed over it
    NOT_RUN = "NOT RUN"
    BROKEN = "BROKEN"  # of one by hand: its own code failed, an internal error


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Asked(_Strict):
    """One mutant, as drawn: source[start:end] of a file of the sglang package written as `after`.

    captured: its line runs while CUDA graphs are captured, so that an engine has to boot with it.
    """

    id: str
    file: str
    line: int
    function: str
    operator: str
    what: str
    start: int
    end: int
    after: str
    captured: bool = False

    @property
    def where(self) -> str:
        return f"{self.file.removeprefix('srt/')}:{self.line}"

    @property
    def module(self) -> str:
        return "sglang." + self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def meets(self, other: Asked) -> bool:
        """Whether both change the same place."""
        return self.file == other.file and self.start < other.end and other.start < self.end


def applied(source: str, mutants: Iterable[Asked]) -> str:
    """The whole file with all of them, none of which meets another, and as many lines as before: nothing else moves."""
    for one in sorted(mutants, key=lambda one: -one.start):
        source = source[: one.start] + one.after + source[one.end :]
    return source


def label(scenario: Scenario) -> str:
    """Its name, and the id of what it is: two families may have one of a name each."""
    return f"{scenario.name} {scenario.id}"


class Campaign(_Strict):
    """What a campaign sets out to do. examples: generated scenarios for each that survives the families."""

    schema_version: Literal[1] = 1
    engine: str
    device: str
    families: tuple[str, ...]
    seed: int
    examples: int
    left_out: tuple[str, ...]
    mutants: tuple[Asked, ...]


class Result(_Strict):
    """What became of a mutant, and what else would have said so over the same runs.

    stage: 'line', the quickest scenarios that execute it, 'family', others, 'asking', or 'generated'. check, row,
    round: the first divergence that nothing else explains. asked: labels of scenarios, in their order. rows: whether
    anything recorded differs from the unmutated run. text: whether a text differs from plain greedy decoding. accepted,
    sound: (tokens, verifies) with and without it.
    """

    id: str
    end: Status
    stage: str = ""
    scenario: str = ""
    check: str = ""
    kinds: tuple[str, ...] = ()
    row: str = ""
    round: int = -1
    asked: tuple[str, ...] = ()
    boots: Count = 0
    seconds: float = 0.0
    rows: bool = False
    text: bool = False
    accepted: tuple[Count, Count] = (0, 0)
    sound: tuple[Count, Count] = (0, 0)
    why: str = ""
    #: whether SGLang's own kv_canary logged a violation; None where it was not on
    canary: bool | None = None

    @property
    def ended(self) -> bool:
        """The engine died, hung or did not start: nobody needs a check to see that."""
        return bool({"CRASH", "HANG"} & set(self.kinds))

    @property
    def goes_on(self) -> bool:
        """Whether another scenario may still show it."""
        return self.end in (Status.SURVIVED, Status.UNKNOWN)

    def below(self, floor: float) -> bool:
        """Whether the accept length fell under this share of what it is without the mutant."""
        (tokens, verifies), (sound, sound_verifies) = self.accepted, self.sound
        return bool(verifies and sound_verifies) and tokens * sound_verifies < floor * sound * verifies


def joined(known: Result | None, before: Result | None, now: Result) -> Result:
    """All that is known of a mutant, where another worker went on with it too: known by now, before this one, after it.

    Who kills it first has the say. What it did in runs that came back later is no part of that.
    """
    if known is None or before is None or known == before:
        return now
    spent = {
        "boots": known.boots + now.boots - before.boots,
        "seconds": round(known.seconds + now.seconds - before.seconds, 1),
    }
    if not known.goes_on:
        return known.model_copy(update=spent)
    said = now if now.end is not Status.SURVIVED else known
    seen = {"rows": known.rows or now.rows, "text": known.text or now.text}
    canaries = [one.canary for one in (known, now) if one.canary is not None]
    return said.model_copy(
        update=spent
        | seen
        | {
            "asked": (*known.asked, *(one for one in now.asked if one not in known.asked)),
            "accepted": _more(known.accepted, before.accepted, now.accepted),
            "sound": _more(known.sound, before.sound, now.sound),
            "canary": any(canaries) if canaries else None,
        }
    )


def _more(known: tuple[int, int], before: tuple[int, int], now: tuple[int, int]) -> tuple[int, int]:
    return known[0] + now[0] - before[0], known[1] + now[1] - before[1]


class Explanation(_Strict):
    """Why a mutant survives. kind: equivalent (nothing that speculation promises differs), or open (a gap of ours).

    driven_by: families, or a device, that do execute it: a campaign over one of them has to kill it.
    """

    kind: Literal["equivalent", "not executed", "open"]
    why: str
    mutants: tuple[str, ...]
    driven_by: tuple[str, ...] = ()

    def holds_in(self, campaign: Campaign) -> bool:
        return not {*campaign.families, campaign.device} & {*self.driven_by}


def explanations(path: Path = EXPLAINED) -> dict[str, Explanation]:
    """mutant -> why it survives; UsageError for one that is explained twice."""
    found: dict[str, Explanation] = {}
    for one in tomllib.loads(path.read_text())["survivors"]:
        explained = Explanation(**one)
        for name in explained.mutants:
            if name in found:
                raise UsageError(f"{path}: {name} is explained twice")
            found[name] = explained
    return found


class NoCampaign(UsageError):
    """A folder without a plan of mutants."""


def read_plan(folder: Path) -> Campaign:
    """NoCampaign where there is none."""
    try:
        return Campaign.model_validate_json((folder / PLAN).read_text())
    except OSError as error:
        raise NoCampaign(f"it holds no mutants: its {PLAN} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise NoCampaign(f"it holds no mutants: its {PLAN} is damaged or not of `eaglecheck mutate`") from error


def read_results(folders: Iterable[Path]) -> dict[str, Result]:
    """mutant -> what became of it; the last line counts where it was asked twice."""
    return {
        result.id: result
        for folder in folders
        for name in (OLD_RESULTS, RESULTS)
        for result in read_lines(folder / name, Result)
    }


def append(folder: Path, result: Result) -> None:
    """What became of a mutant, for `read_results`."""
    add_line(folder / RESULTS, result)


def read_lines(path: Path, kind: type[Record]) -> list[Record]:
    """One record a line. One that is torn, or of another version, is as if it were not there: it is done again."""
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValidationError):
            found.append(kind.model_validate_json(line))
    return found


def add_line(path: Path, record: BaseModel) -> None:
    """One write, so that whoever is ended keeps whole lines; behind a torn one it begins anew. WriteError: no room."""
    with (
        room(path.parent, kept="make room, and type the same command: what was asked before is kept"),
        path.open("ab+") as file,
    ):
        size = file.seek(0, SEEK_END)
        file.seek(max(0, size - 1))
        torn = file.read(1) not in (b"", b"\n")
        file.write((b"\n" if torn else b"") + record.model_dump_json().encode() + b"\n")


def shares(mutants: Sequence[Asked], shard: tuple[int, int]) -> list[Asked]:
    """Every n-th: shards are about as long as each other."""
    number, of = shard
    return list(mutants[number - 1 :: of])
