"""The command line: parse, call the library, print.

How a command is added: write ``cli/NAME.py`` with a click command called ``command`` in it, and add one line to ``COMMANDS`` below. The
file is imported only when that command runs, so ``stagekit --help`` stays fast. The body is thin::

    @click.command()
    @click.argument("url")
    @store_options()                                    # cli/options.py: --json --endpoint-url --profile …
    def command(url: str, store: StoreConfig, printer: Printer) -> Exit | None:
        \"\"\"One sentence, the same as in COMMANDS.\"\"\"
        from ..report import ls                         # heavy modules inside the function
        for entry in ls(url, store=store, on_event=printer.on_event):
            printer.data(entry.line, {"event": "entry", **entry.record})

``printer.on_event`` is the ``on_event=`` of library calls; ``printer.data`` writes a result (text, or one JSON line with ``--json``) to
standard output; progress and messages go to standard error. Raise a ``StagekitError`` for what a person must read: ``main`` prints it as
one line and picks the exit code (cli/exits.py). Returning ``None`` means done.
"""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click

from .. import __version__
from ..errors import StagekitError
from .exits import Exit, Terminated, exit_of
from .output import error_line

# name → (module in this package, what it does). The sentence is the command's own first one, so that --help needs no import.
COMMANDS: dict[str, tuple[str, str]] = {
    "bench": ("bench", "Tell what limits training on a data set from here: the link, the CPU, or the training step."),
    "cp": ("cp", "Copy objects from one store to another, without a disk in between."),
    "demo": ("demo", "Show the whole path on real data: shard, stream, train, throw the machine away, resume."),
    "doctor": ("doctor", "Tell what this machine and a store can do, what will fail, and what to change."),
    "fit": ("fit", "Tell what a model needs of a GPU, RAM, disk and link, and whether a server has it."),
    "index": ("index", "Make existing WebDataset tars a data set, without rewriting them."),
    "info": ("info", "Tell what a data set, a run or a checkpoint holds."),
    "ls": ("ls", "List data sets, runs and checkpoints below a URL."),
    "pull": ("pull", "Copy a run's checkpoint, a data set or any prefix to a local directory, verified."),
    "push": ("push", "Send a folder to a bucket, every file verified there."),
    "prune": ("prune", "Remove old checkpoints, and what dead machines left behind."),
    "resume": ("resume", "Tell how a run was last started, or start it here in the same way."),
    "run": ("run", "Run any training command with its checkpoints and logs kept in a bucket."),
    "shard": ("shard", "Pack raw data into WebDataset shards, straight into the bucket."),
    "stage": ("pull", "Copy a run's checkpoint, a data set or any prefix to a local directory, verified."),
    "teardown": ("teardown", "Finish uploads, then tell whether this server may be destroyed."),
    "verify": ("verify", "Check that a data set or run in the bucket is whole."),
}


class _Commands(click.Group):
    """The group whose commands are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - the signature is click's
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - the signature is click's
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f".{COMMANDS[cmd_name][0]}", __name__).command
        command.name = cmd_name
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, message="stagekit %(version)s")
def stagekit() -> None:
    """Stream training data from S3-compatible storage, sync checkpoints back, and tell when the server may be destroyed.

    Every command takes --json (one JSON object a line on standard output) and answers to --help.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Errors that a person can act on are one line, never a traceback."""
    _open_missing_streams()
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    as_json = "--json" in own
    try:
        with _sigterm_as_exception():
            code = stagekit.main(arguments, prog_name="stagekit", standalone_mode=False)
            sys.stdout.flush()
            return int(code or Exit.DONE)
    except click.UsageError as error:
        behind = _goes_behind(error, own)
        if behind is not None:
            error_line("UsageError", behind, as_json=as_json)
            return Exit.USAGE
        usage = error.ctx.get_usage().replace("\n", " ") if error.ctx else ""
        help_of = error.ctx.command_path if error.ctx else "stagekit"
        message = f"{error.format_message()} ({usage}; try {help_of} --help)" if usage else error.format_message()
        error_line("UsageError", message, as_json=as_json)
        return Exit.USAGE
    except click.ClickException as error:
        error_line(type(error).__name__, error.format_message(), as_json=as_json)
        return Exit.FAILED
    except (KeyboardInterrupt, click.Abort):
        error_line("Interrupted", "interrupted; what was finished stays, and the same command continues", as_json=as_json)
        return Exit.INTERRUPTED
    except Terminated:
        error_line("Terminated", "ended by SIGTERM; what was finished stays, and the same command continues", as_json=as_json)
        return Exit.TERMINATED
    except BrokenPipeError:
        # The reader of our output went away (stagekit ls … | head). Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return Exit.FAILED
    except (StagekitError, OSError) as error:
        if _is_about_stdout(error):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python would try again when it flushes at exit
            reason = getattr(error, "strerror", None) or error
            error_line("OutputError", f"writing to standard output: {reason}; what was to be shown is cut short", as_json=False)
            return Exit.FAILED
        error_line(type(error).__name__, str(error), as_json=as_json)
        return exit_of(error)


def _goes_behind(error: click.UsageError, arguments: Sequence[str]) -> str | None:
    """What to say where an option of a command stands before the command; ``None`` for any other error."""
    if not isinstance(error, click.NoSuchOption) or error.ctx is None or error.ctx.command is not stagekit:
        return None
    name = next((one for one in arguments if one in COMMANDS), None)
    command = stagekit.get_command(error.ctx, name or "ls")
    if command is None or not any(error.option_name in (*one.opts, *one.secondary_opts) for one in command.params):
        return None
    return f"{error.option_name} goes behind the command: stagekit {name or 'COMMAND'} {error.option_name} …"


def _is_about_stdout(error: BaseException) -> bool:
    """Whether ``error`` says that standard output takes nothing, as with a full disk behind it: it names no file, printing raised it."""
    if not isinstance(error, OSError) or isinstance(error, StagekitError) or error.filename is not None:
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = str(trace.tb_frame.f_globals.get("__name__")) if trace is not None else ""
    return module.startswith(("click.", __name__))


def _open_missing_streams() -> None:
    """A stream that was closed before we started (``2>&-``, some daemons) is ``None`` in Python, and the next file that is opened would get
    its number, and with it what children write there. /dev/null takes its place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115, PTH123 - open for as long as the process lives
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name need not be text; a verdict must be printed all the same


@contextmanager
def _sigterm_as_exception() -> Iterator[None]:
    def terminate(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature is Python's
        raise Terminated

    before: Callable[..., Any] | int | None
    try:
        before = signal.signal(signal.SIGTERM, terminate)
    except ValueError:  # not in the main thread: signals are somebody else's business
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
