"""May this server be destroyed? The answer, with reasons and fixes. docs/teardown.md has the table of rows."""

from __future__ import annotations

from .findings import Answer, Finding, Scope, Verdict
from .judge import judge, teardown
from .scope import find_scope

__all__ = ["Answer", "Finding", "Scope", "Verdict", "find_scope", "judge", "teardown"]
