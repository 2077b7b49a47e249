"""The options that every command shares, and what they become: a ``StoreConfig`` and a ``Printer``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ..config import StoreConfig
from ..units import parse_duration, parse_size
from .output import Printer, open_printer

# Commands that only look give up within this time; those that move bytes keep trying for minutes.
LOOKING_S = 8.0


def store_options(*, retry_s: float | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add ``--json --endpoint-url --profile --region --ca-bundle --anonymous``; the command gets ``store=`` and ``printer=`` for them.

    ``retry_s`` is the command's budget for repeating one call, in seconds, where it is another than ``StoreConfig``'s.
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
            **kwargs: Any,
        ) -> Any:
            settings: dict[str, Any] = {} if retry_s is None else {"retry_s": retry_s, "connect_timeout_s": min(4.0, retry_s)}
            store = StoreConfig(
                endpoint_url=endpoint_url, profile=profile, region=region, ca_bundle=ca_bundle, anonymous=anonymous, **settings
            )
            with open_printer(as_json=json) as printer:
                return function(*args, store=store, printer=printer, **kwargs)

        for option in reversed(_OPTIONS):
            run = option(run)
        return run

    return decorate


_OPTIONS: tuple[Callable[[Callable[..., Any]], Callable[..., Any]], ...] = (
    click.option(
        "--endpoint-url", metavar="URL", help="The S3 endpoint. [default: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL or S3_ENDPOINT_URL]"
    ),
    click.option("--profile", metavar="NAME", help="Endpoint and keys of this AWS profile."),
    click.option("--region", metavar="NAME", help="The region to sign for."),
    click.option("--ca-bundle", metavar="FILE", help="A PEM file for an endpoint with a certificate of its own."),
    click.option("--anonymous", is_flag=True, help="Send unsigned requests."),
    click.option("--json", is_flag=True, help="One JSON object a line on standard output."),
)


if TYPE_CHECKING:
    _BytesType = click.ParamType[int]
    _SecondsType = click.ParamType[float]
else:  # generic at run time since click 8.2 only
    _BytesType = _SecondsType = click.ParamType


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


SIZE = Size()
DURATION = Duration()

__all__ = ["DURATION", "LOOKING_S", "SIZE", "Printer", "store_options"]
