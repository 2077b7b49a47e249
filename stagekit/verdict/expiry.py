"""The row about lifecycle rules: a bucket that is about to remove what it was given to keep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..store.base import ObjectInfo
from ..store.extras import ExpiryRule

_DAY_S = 86_400.0
SOON_S = 7 * _DAY_S


@dataclass(frozen=True, slots=True)
class Expiry:
    """The first of some objects that a rule removes, and when."""

    rule: ExpiryRule
    key: str
    at_s: float


def first_expiry(objects: Iterable[ObjectInfo], base: str, rules: Sequence[ExpiryRule]) -> Expiry | None:
    """What ``rules`` remove first of ``objects``, whose keys lie below ``base`` in the bucket; ``None`` when they remove none."""
    found: Expiry | None = None
    for info in objects:
        for rule in rules:
            if not f"{base}{info.key}".startswith(rule.prefix):
                continue
            if (rule.above is not None and info.size < rule.above) or (rule.below is not None and info.size >= rule.below):
                continue
            at_s = rule.at_s
            if at_s is None:
                if rule.days is None or info.modified_s is None:
                    continue
                at_s = info.modified_s + rule.days * _DAY_S
            if found is None or at_s < found.at_s:
                found = Expiry(rule, info.key, at_s)
    return found
