"""Will it fit: what a model and a plan need of a GPU, of RAM, of the disk and of the link, by formulas whose every line is shown."""

from __future__ import annotations

from .estimate import Fit as Fit
from .estimate import fit as fit
