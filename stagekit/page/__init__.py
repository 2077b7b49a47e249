"""A run or a data set as one page of HTML that needs nothing besides itself: no network, no script, no fonts."""

from __future__ import annotations
