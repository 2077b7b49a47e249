"""What the installed botocore can be told. Stagekit works with the one that is there, new or years old, and moves none.

Releases differ in three things that matter here: the settings of a client, the parameters of a call, and what is read of the AWS
configuration file. What one of them has is looked up in it, never concluded from its version. Everything else that Stagekit asks of
botocore is the same in all releases since the floor in ``pyproject.toml``.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

_CONDITIONAL = ("PutObject", "CompleteMultipartUpload")
_CONDITIONS = {"IfNoneMatch": "If-None-Match", "IfMatch": "If-Match"}
_SET_ASIDE = "stagekit_conditions"


def known_settings(**wanted: Any) -> dict[str, Any]:
    """Those of ``wanted`` that botocore's ``Config`` has. For settings that switch something off: a release without one does not do it.

    So ``request_checksum_calculation="when_required"`` is left out before 1.36, which sends checksums only where they are required.
    """
    from botocore.config import Config

    return {name: value for name, value in wanted.items() if name in Config.OPTION_DEFAULTS}


def service_endpoints(configuration: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The section ``[services NAME]`` of ``configuration``, botocore's ``full_config``; empty where there is none.

    A release that does not know what the section is for has it under its whole heading. Looking only where newer ones have it would find
    nothing, and send the keys of a profile to AWS instead of to the endpoint that it names.
    """
    found = configuration.get("services", {}).get(name)
    if found is None:
        sections = (
            value for heading, value in configuration.items() if heading.startswith("services") and _words(heading) == ["services", name]
        )
        found = next(sections, {})
    return found if isinstance(found, Mapping) else {}


def _words(heading: str) -> list[str]:
    try:
        return shlex.split(heading)
    except ValueError:  # a quote that is not closed, which botocore passes over too
        return []


def take_conditions(api: Any) -> None:
    """Let ``api``, an S3 client, take ``IfNoneMatch`` and ``IfMatch`` for whatever writes, also where they are newer than its botocore.

    Then they are sent as the headers that they stand for, and signed like all others: the request is the same, byte for byte.
    """
    for operation in _CONDITIONAL:
        known = api.meta.service_model.operation_model(operation).input_shape.members
        if not known.keys() >= _CONDITIONS.keys():
            api.meta.events.register(f"provide-client-params.s3.{operation}", _set_aside)
            api.meta.events.register(f"before-call.s3.{operation}", _add_headers)


def _set_aside(params: dict[str, Any], model: Any, context: dict[str, Any], **_: Any) -> dict[str, Any]:
    newer = (_CONDITIONS.keys() & params.keys()) - model.input_shape.members.keys()
    context[_SET_ASIDE] = {_CONDITIONS[name]: params[name] for name in newer}
    return {name: value for name, value in params.items() if name not in newer}


def _add_headers(params: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
    params["headers"].update(context[_SET_ASIDE])
