"""Doctor: what this machine, its disks and the stores in use can do, what will fail, and what to change. Nothing here holds a secret."""

from __future__ import annotations

from .examination import Diagnosis as Diagnosis
from .examination import doctor as doctor
