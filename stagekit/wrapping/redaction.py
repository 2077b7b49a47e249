"""Secrets taken out of command lines and diffs before these leave the machine.

What is known by its name (``--token X``, ``password=``, ``HF_TOKEN=``), by its shape (keys of AWS, Hugging Face, OpenAI, GitHub, Slack,
private keys, URLs with a password), or by its value (whatever the environment holds under a name like these) becomes ``[redacted]``. A
secret that is none of the three cannot be told from other text; ``--no-record`` is for that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

REDACTED = "[redacted]"

_KEYS = r"(?:api|access|private|secret|account|storage|signing|encryption|wandb|comet|openai|anthropic)[_-]?key"
_WORDS = rf"(?:token|passw(?:or)?d|passphrase|secret|{_KEYS}|credentials?|auth(?:orization)?)"
_NAME = re.compile(rf"(?:^|[_.-]){_WORDS}s?(?:[_-]?(?:id|value))?$", re.IGNORECASE)
_HARMLESS = re.compile(r"(?:max|num|min|n|new|pad|eos|bos|unk|mask|special|add|tokens?_per|per)[_-].*token", re.IGNORECASE)
_SHAPES = re.compile(
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|\bhf_[A-Za-z0-9]{16,}"
    r"|\bsk-[A-Za-z0-9_-]{16,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_[A-Za-z0-9_]{16,}|\bglpat-[A-Za-z0-9_-]{16,}"
    r"|\bxox[abeprs]-[A-Za-z0-9-]{10,}"
    r"|\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"
)
_BEARER = re.compile(r"(\b(?:Bearer|Basic)\s+)[A-Za-z0-9._~+/=-]{8,}")
_URL = re.compile(r"(\b[a-zA-Z][a-zA-Z0-9+.-]*://)[^\s/@'\"]+@")
_PRIVATE = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_VALUE = r"(?P<value>\"[^\"\n]*\"|'[^'\n]*'|[^\s\"',;()\[\]{}]+)"
_ASSIGNED = re.compile(rf"(?P<name>[A-Za-z0-9_.-]*{_WORDS}[A-Za-z0-9_-]*)(?P<is>[\"'\])]*\s*(?:=(?!=)|:)\s*){_VALUE}", re.IGNORECASE)
_SPACED = re.compile(rf"(?P<name>--?[A-Za-z0-9_.-]*{_WORDS})(?P<is>\s+){_VALUE}", re.IGNORECASE)
_LIKELY = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9+/_=.~-]{6,}")  # code such as ``token: str`` must stay what it is
_SHORTEST = 6


def is_secret_name(name: str) -> bool:
    """Whether something called so is a secret: ``HF_TOKEN``, ``--password``, ``AWS_SECRET_ACCESS_KEY``; not ``max_new_tokens``."""
    bare = name.lstrip("-")
    return _NAME.search(bare) is not None and _HARMLESS.search(bare) is None


def secret_values(environ: Mapping[str, str]) -> list[str]:
    """What the environment holds under secret names, longest first: to be taken out wherever it stands."""
    return sorted({value for name, value in environ.items() if is_secret_name(name) and len(value) >= _SHORTEST}, key=len, reverse=True)


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    """``text`` without secrets; ``secrets`` are values that are known to be some."""
    for value in secrets:
        text = text.replace(value, REDACTED)
    text = _PRIVATE.sub(REDACTED, text)
    text = _URL.sub(rf"\1{REDACTED}@", text)
    text = _BEARER.sub(rf"\1{REDACTED}", text)
    text = _SHAPES.sub(REDACTED, text)
    for pattern in (_ASSIGNED, _SPACED):
        text = pattern.sub(_assigned, text)
    return text


def redacted_command(command: Sequence[str], secrets: Iterable[str] = ()) -> list[str]:
    """The words of a command line without secrets; a value that follows its option as a word of its own is taken out as well."""
    known = list(secrets)
    result: list[str] = []
    hide = script = False
    for word in command:
        if hide and not word.startswith("-"):
            result.append(REDACTED)
            hide = False
            continue
        name, equals, _ = word.partition("=")
        hide = not equals and word.startswith("-") and is_secret_name(name)
        whole = equals and is_secret_name(name) and not script
        result.append(f"{name}={REDACTED}" if whole else redacted(word, known))
        script = re.fullmatch(r"-[a-z]*c", word) is not None  # what follows is many words in one
    return result


def _assigned(match: re.Match[str]) -> str:
    value = match["value"]
    if not is_secret_name(match["name"]) or REDACTED in value or value.startswith("-"):
        return match[0]
    if value[0] in "\"'":
        return f"{match['name']}{match['is']}{value[0]}{REDACTED}{value[0]}"
    is_bare = match["name"].startswith("-") or match["name"].isupper()  # of a shell, where nothing is quoted
    return f"{match['name']}{match['is']}{REDACTED}" if is_bare or _LIKELY.fullmatch(value) else match[0]
