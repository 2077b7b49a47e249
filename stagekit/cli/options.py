"""The options that every command shares, and what they become: a ``StoreConfig`` and a ``Printer``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..config import StoreConfig
from ..errors import UsageError
from ..units import parse_duration, parse_rate, parse_size
from .output import Printer, open_printer

if TYPE_CHECKING:
    _BytesType = click.ParamType[int]
    _SecondsType = click.ParamType[float]
else:  # generic at run time since click 8.2 only
    _BytesType = _SecondsType = click.ParamType

# Commands that only look give up within this time; those that move bytes keep trying for minutes.
LOOKING_S = 8.0


def store_options(*, retry_s: float | None = None, beside: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add ``--json`` and the options of a ``StoreConfig``; the command gets ``store=`` and ``printer=`` for them.

    ``retry_s`` is the command's budget for repeating one call, in seconds, where it is another than ``StoreConfig``'s. ``beside``: another
    program prints to the same terminal, so that ours are lines that say whose they are.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(
            *args: Any,
            json: bool,
            endpoint_url: str | None,
            profile: str | None,
            region: str | None,
            ca_bundle: str | None,
            anonymous: bool,
            max_requests_per_s: float | None,
            max_bytes_per_s: int | None,
            **kwargs: Any,
        ) -> Any:
            settings: dict[str, Any] = {} if retry_s is None else {"retry_s": retry_s, "connect_timeout_s": min(4.0, retry_s)}
            store = StoreConfig(
                endpoint_url=endpoint_url,
                profile=profile,
                region=region,
                ca_bundle=ca_bundle,
                anonymous=anonymous,
                max_requests_per_s=max_requests_per_s,
                max_bytes_per_s=max_bytes_per_s,
                **settings,
            )
            with open_printer(as_json=json, beside=beside) as printer:
                return function(*args, store=store, printer=printer, **kwargs)

        for option in reversed(_OPTIONS):
            run = option(run)
        return run

    return decorate


class Rate(_BytesType):
    """``20MB/s`` as whole bytes a second."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ARG002 - click's signature
        return round(parse_rate(value, name=param.opts[0] if param else "rate"))


class Number(click.FloatRange):
    """A number of the range; ``nan`` and ``inf`` are none, though they compare with anything."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is no number.", param, ctx)
        return number


_OPTIONS: tuple[Callable[[Callable[..., Any]], Callable[..., Any]], ...] = (
    click.option(
        "--endpoint-url", metavar="URL", help="The S3 endpoint. [default: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL or S3_ENDPOINT_URL]"
    ),
    click.option("--profile", metavar="NAME", help="Endpoint and keys of this AWS profile."),
    click.option("--region", metavar="NAME", help="The region to sign for."),
    click.option("--ca-bundle", metavar="FILE", help="A PEM file for an endpoint with a certificate of its own."),
    click.option("--anonymous", is_flag=True, help="Send unsigned requests."),
    click.option(
        "--max-requests-per-s",
        type=Number(min=0, min_open=True),
        metavar="N",
        help="No more requests a second than this to one endpoint, from all processes of this machine that were told so.",
    ),
    click.option(
        "--max-bytes-per-s", type=Rate(), metavar="RATE", help="The same for bytes in both directions, such as 10MB/s or 80Mbit/s."
    ),
    click.option("--json", is_flag=True, help="One JSON object a line on standard output."),
)


def bulk_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--threads --limit-rate --delete``, which every command that copies many objects has."""
    for option in reversed(_BULK_OPTIONS):
        function = option(function)
    return function


engine_option = click.option(
    "--engine",
    type=click.Choice(["auto", "builtin", "s5cmd", "rclone"]),
    default="auto",
    show_default=True,
    help="What copies. Whichever it is, everything is verified afterwards.",
)
_BULK_OPTIONS: tuple[Callable[[Callable[..., Any]], Callable[..., Any]], ...] = (
    click.option("--threads", type=click.IntRange(min=1), metavar="N", default=8, show_default=True, help="Requests at the same time."),
    click.option("--limit-rate", metavar="RATE", help="No more bytes a second than this, such as 20MB/s or 40Mbit/s."),
    click.option("--delete", is_flag=True, help="Make the target what the source is. What that removes or replaces is told first."),
)


class Size(_BytesType):
    """``256MiB`` as bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ARG002 - click's signature
        return parse_size(value, name=param.opts[0] if param else "size")


class Duration(_SecondsType):
    """``10min`` as seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ARG002 - click's signature
        return parse_duration(value, name=param.opts[0] if param else "duration")


def best_of(text: str | None) -> tuple[str, str, int] | None:
    """``val_loss:min:2`` as metric, mode and count. Raises ``UsageError``."""
    if text is None:
        return None
    metric, _, rest = text.partition(":")
    mode, _, count = rest.partition(":")
    if not metric or mode not in ("min", "max") or not (count.isascii() and count.isdecimal() and int(count)):
        raise UsageError(f"--keep-best: {text!r} is not METRIC:min|max:N, such as val_loss:min:2")
    return metric, mode, int(count)


STORE_OPTIONS = ("endpoint_url", "profile", "region", "ca_bundle", "anonymous", "max_requests_per_s", "max_bytes_per_s")


def given(context: click.Context, *, only: Collection[str] = ()) -> list[str]:
    """The options that were given on the command line, as words that mean the same; with ``only``, those of these names.

    ``--json`` is left out: it is about this terminal.
    """
    words: list[str] = []
    for param in context.command.params:
        if not isinstance(param, click.Option) or param.name is None or param.name == "json":
            continue
        if only and param.name not in only:
            continue
        if context.get_parameter_source(param.name) is not ParameterSource.COMMANDLINE:
            continue
        value = context.params[param.name]
        if param.is_flag:
            words.append(param.opts[0] if value else param.secondary_opts[0])
            continue
        for one in value if param.multiple else [value]:
            words += [param.opts[0], f"{one:g}" if isinstance(one, float) else str(one)]
    return words


SIZE = Size()
DURATION = Duration()

__all__ = [
    "DURATION",
    "LOOKING_S",
    "SIZE",
    "STORE_OPTIONS",
    "Printer",
    "best_of",
    "bulk_options",
    "engine_option",
    "given",
    "store_options",
]
