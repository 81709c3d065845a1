"""The `eaglecheck` command, a module a verb.

Exit codes: 0 pass, 1 divergence, 2 usage error, 3 unknown, 4 internal error.
"""

from __future__ import annotations

import io
import re
import shlex
import sys
from collections.abc import Container, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from harness.cli import (
    bisect,
    diff,
    engines,
    export,
    findings,
    fuzz,
    matrix,
    mutants,
    mutate,
    night,
    recheck,
    replay,
    report,
    run,
)
from harness.cli.outcome import TYPED, Exit, full_output_reported, say
from harness.cli.refused import Refusal, in_words
from harness.driving.own_source import own_version

#: An option with an empty value behind its equals sign, as `--runs=$UNSET` makes it.
EMPTY = re.compile(r"(--[a-z-]+)=")


@contextmanager
def said_of(ctx: Any) -> Iterator[None]:
    """What the parser refuses in this block, said in our words. ctx: the command's, where the refusal names none."""
    try:
        yield
    except Refusal as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        raise typer.Exit(int(say(in_words(error, ctx, TYPED.get()), Exit.USAGE))) from error


class Once(TyperGroup):
    """Refuses an option of one value that is given twice, of which the parser would take the last without a word."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and not isinstance(command, TyperGroup):
            inner = command.context_class(command, info_name=name, parent=ctx)
            with said_of(inner):
                _, _, order = command.make_parser(inner).parse_args(args=list(rest))
            for option in order:
                if order.count(option) > 1 and not option.multiple and option.nargs == 1:
                    raise typer.Exit(int(say(_given_twice(option, rest), Exit.USAGE)))
        return name, command, rest


def _given_twice(option: Any, args: list[str]) -> str:
    """What to say and to type; names that go into one word are joined."""
    spelled = {*option.opts, *option.secondary_opts}
    typed = list(dict.fromkeys(one.partition("=")[0] for one in args if one.partition("=")[0] in spelled))
    if len(typed) > 1:
        return f"{' and '.join(typed)} are one option\n  give one of them"
    if "omma-separated" not in (option.help or ""):
        return f"{typed[0]} is given twice\n  give it once"
    pairs = [(one.partition("="), after) for one, after in pairwise([*args, ""])]
    values = [value if equals else after for (name, equals, value), after in pairs if name == typed[0]]
    return f"{typed[0]} is given twice\n  name all in one word:  {typed[0]} {','.join(values)}"


def _before_command(args: list[str], commands: Container[str]) -> str:
    """What to say of an option that stands before the command, and to type."""
    command = next((one for one in args if one in commands), "")
    behind = [one for one in args if one != command]
    typed = shlex.join(["eaglecheck", command, *behind] if command else ["eaglecheck", "run", *args])
    return f"{args[0]} stands before the command, and options stand behind it\n  type:  {typed}"


class Commands(Once):
    """Refuses empty values for every command at once: an empty path would be read as the current folder."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for before, one in zip(["", *args], args, strict=False):
            empty = EMPTY.fullmatch(one)
            if empty or not one:
                option = empty[1] if empty else before if before.startswith("--") else ""
                text = f"{option or 'an argument'} is empty: is a variable of your shell not set?"
                raise typer.Exit(int(say(f"{text}\n  give a value, or leave {option or 'it'} out", Exit.USAGE)))
        if args and args[0].startswith("--") and args[0] not in ("--help", "--version"):
            raise typer.Exit(int(say(_before_command(args, self.commands), Exit.USAGE)))
        TYPED.set(list(args))
        with said_of(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with said_of(ctx):
            return super().invoke(ctx)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Help is printed outside every command, and to a full disk too. What a terminal has no letter for is a `?`."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        with full_output_reported():
            return super().main(*args, **kwargs)


app = typer.Typer(
    cls=Commands,
    name="eaglecheck",
    help="Differential correctness harness for EAGLE speculative decoding in SGLang.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text, whose lines can be copied
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},  # of every command: they inherit it
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"eaglecheck {own_version()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """What stands before a command."""


app.command("run")(run.command)
app.command("export")(export.command)
app.command("fuzz")(fuzz.command)
app.command("recheck")(recheck.command)
app.command("replay")(replay.command)
app.command("matrix")(matrix.command)
app.command("mutants")(mutants.command)
app.command("mutate")(mutate.command)
app.command("bisect")(bisect.command)
app.command("report")(report.command)
app.command("diff")(diff.command)
app.command("night")(night.command)
app.command("findings")(findings.command)
app.command("doctor")(engines.doctor)
app.add_typer(engines.engines, name="engines", cls=Once)

__all__ = ["app"]
