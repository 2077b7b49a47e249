"""Imports run downward only, nothing in a level goes in a circle, and each heavy package has its room (docs/design.md).

A new module needs a line in ``LEVELS``: where it belongs is decided when it is written, not when it has become a knot.
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A package's line holds for all that is in it, unless something in it has a line of its own.
LEVELS = {
    # values
    "errors": 0,
    "units": 0,
    "location": 0,
    "config": 0,
    "folders": 0,
    "locks": 0,
    "processes": 0,
    "progress": 0,
    "mounts": 0,
    "parallel": 0,
    "pieces": 0,
    "pace": 0,
    "budget": 0,
    "advice": 0,
    "histogram": 0,
    "facts": 0,
    "interrupts": 0,
    "installing": 0,
    "outages": 0,
    "sdk": 0,
    "pickles": 0,
    # ground
    "store": 1,
    "shards": 1,
    "order": 1,
    # movers
    "transfer": 2,
    # work
    "sources": 3,
    "publishing": 3,
    "mds": 3,
    "dataset": 3,
    "indexing": 3,
    "stream": 3,
    "runs": 3,
    "saves": 3,
    "testing": 3,
    # duties
    "contents": 4,
    "wrapping": 4,
    "pruning": 4,
    "looked": 4,
    "copies": 4,
    "verification": 4,
    "verdict": 4,
    "diagnosis": 4,
    "report": 4,
    "page": 4,
    "fitting": 4,
    # frameworks
    "torch": 5,
    "hooks": 5,
    # surface
    "interop": 6,
    "benchmark": 6,
    "demo": 6,
    "reference": 6,
    "cli": 6,
    "__main__": 6,
    "": 7,  # the package itself, which names what is public
}
# These share a level and do not know each other.
STRANGERS = ("store", "shards", "order")
# Nobody ships faults by accident: what is there for tests is used by tests, and by the demo for its server.
USERS_OF_TESTING = ("testing", "demo")
# Packages that are slow to load, or that not everyone has, and the only modules that may import them.
ROOMS = {
    "torch": ("torch", "hooks", "demo.train"),
    "botocore": ("store", "sdk"),
    "boto3": (),
    "urllib3": ("store",),
    "obstore": ("store",),
    "fsspec": ("store",),
    "s3fs": ("store",),
    "aiobotocore": (),
    "webdataset": ("interop",),
    "transformers": ("hooks.transformers", "hooks.trainer_data"),
    "peft": (),
    "lightning": ("hooks.lightning",),
    "lightning_fabric": (),
    "huggingface_hub": ("verdict.origins",),
    "accelerate": ("hooks.accelerate", "hooks.trainer_files"),
    "PIL": ("shards.sample", "page.samples", "torch", "demo"),
    "sklearn": ("demo",),
    "distributed": ("publishing.engines",),
    "streaming": ("mds.job", "interop"),
    "pyarrow": ("sources.arrow", "sources.compressed"),
    "click": ("cli",),
    "rich": ("cli",),
}


@dataclass(frozen=True)
class Import:
    """``by`` and ``target`` are names below ``stagekit``; a package from elsewhere has ``foreign`` set."""

    by: str
    target: str
    line: int
    foreign: bool

    def __str__(self) -> str:
        return f"stagekit.{self.by}:{self.line} imports {self.target if self.foreign else f'stagekit.{self.target}'.rstrip('.')}"


def modules(package: Path) -> dict[str, Path]:
    """Every module of the package by its name below ``stagekit``; the package itself is ``""``."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(package: Path) -> list[Import]:
    """Every import statement there is, those inside functions included."""
    known = modules(package)
    found = []
    for by, path in known.items():
        inside = by.split(".") if by else []
        if path.name != "__init__.py":
            inside = inside[:-1]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                named = [(alias.name, "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level:
                above = inside[: len(inside) - node.level + 1]
                named = [(".".join(["stagekit", *above, *filter(None, [node.module])]), alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                named = [(node.module or "", alias.name) for alias in node.names]
            else:
                continue
            for source, name in named:
                top, _, below = source.partition(".")
                if top != "stagekit":
                    found.append(Import(by, top, node.lineno, foreign=True))
                elif name and (deeper := f"{below}.{name}".lstrip(".")) in known:
                    found.append(Import(by, deeper, node.lineno, foreign=False))
                elif (below, name) != ("", "__version__"):
                    found.append(Import(by, below, node.lineno, foreign=False))
    return found


def level(module: str) -> int | None:
    """The level of the nearest line in the table."""
    while module:
        if module in LEVELS:
            return LEVELS[module]
        module = module.rpartition(".")[0]
    return None


def belongs(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(room + ".") for room in rooms)


def complaints(package: Path) -> list[str]:
    """What is wrong with the package's imports, one sentence each."""
    known = modules(package)
    found = [f"stagekit.{module} has no level" for module in known if module and level(module) is None]
    edges: dict[str, set[str]] = {module: set() for module in known}
    for one in imports(package):
        if one.foreign:
            if not belongs(one.by, ROOMS.get(one.target, (one.by,))):
                found.append(f"{one}, whose room is {', '.join(ROOMS[one.target]) or 'nowhere'}")
            continue
        if one.target not in known:
            found.append(f"{one}, which does not exist")
            continue
        if not one.by:
            continue  # the package loads its names lazily; what it names for type checkers may be anywhere
        here, there = level(one.by), LEVELS[""] if not one.target else level(one.target)
        if here is None or there is None:
            continue
        if there > here and not (here == LEVELS["demo"] and not one.target):  # the demo's trainer reads as a user would write it
            found.append(f"{one}: upward, from level {here} to {there}")
        first, second = one.by.split(".")[0], one.target.split(".")[0]
        if first != second and first in STRANGERS and second in STRANGERS:
            found.append(f"{one}: they do not know each other")
        if second == "testing" and not belongs(one.by, USERS_OF_TESTING):
            found.append(f"{one}: only tests and the demo use it")
        if here == there and one.target:
            edges[one.by].add(one.target)
    return found + [f"a circle: {' → '.join(circle)}" for circle in circles(edges)]


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """The ways on which a module reaches itself, each once."""
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(module: str, way: list[str]) -> None:
        if module in way:
            found.append([*way[way.index(module) :], module])
        elif module not in done:
            for target in sorted(edges[module]):
                visit(target, [*way, module])
            done.add(module)

    for module in sorted(edges):
        visit(module, [])
    return found


def test_the_packages_imports() -> None:
    assert complaints(ROOT / "stagekit") == []


def test_the_table_names_only_what_exists() -> None:
    known = modules(ROOT / "stagekit")
    assert [name for name in LEVELS if name not in known] == []


def test_the_page_about_the_design_has_the_same_table() -> None:
    """A folder's name ends in a slash there."""
    page = (ROOT / "docs" / "design.md").read_text()
    named = {
        name: int(number)
        for number, cell in re.findall(r"^\| (\d) \w+ \| (.*?) \|", page, re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", cell)
    }
    known = modules(ROOT / "stagekit")
    here = {name + "/" * (known[name].name == "__init__.py"): level for name, level in LEVELS.items() if name and "." not in name}
    assert named == here, "docs/design.md, the table of levels"


def test_core_modules_import_only_what_the_core_install_brings() -> None:
    """Anything else must be in a room above, so that a missing package is met by its own message."""
    core = {"numpy", "botocore", "fsspec", "xxhash", "click", "rich", "urllib3"}
    optional = set(ROOMS) - core
    strange = [
        str(one)
        for one in imports(ROOT / "stagekit")
        if one.foreign and one.target not in core | optional | {"msgpack"} and one.target not in sys.stdlib_module_names
    ]
    assert strange == []


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("shards/new.py", "from ..runs import Run", "stagekit.shards.new:1 imports stagekit.runs: upward, from level 1 to 3"),
        (
            "shards/new.py",
            "def f():\n    from stagekit.runs import Run",
            "stagekit.shards.new:2 imports stagekit.runs: upward, from level 1 to 3",
        ),
        ("shards/new.py", "import stagekit.runs", "stagekit.shards.new:1 imports stagekit.runs: upward, from level 1 to 3"),
        ("shards/new.py", "from .. import runs", "stagekit.shards.new:1 imports stagekit.runs: upward, from level 1 to 3"),
        ("shards/new.py", "from stagekit import Run", "stagekit.shards.new:1 imports stagekit: upward, from level 1 to 7"),
        ("shards/new.py", "from ..store import base", "stagekit.shards.new:1 imports stagekit.store: they do not know each other"),
        ("runs/new.py", "from ..testing import x", "stagekit.runs.new:1 imports stagekit.testing: only tests and the demo use it"),
        ("runs/new.py", "import torch.nn", "stagekit.runs.new:1 imports torch, whose room is torch, hooks, demo.train"),
        ("runs/new.py", "def f():\n    from botocore.session import S", "stagekit.runs.new:2 imports botocore, whose room is store, sdk"),
        ("runs/new.py", "from ..nowhere import x", "stagekit.runs.new:1 imports stagekit.nowhere, which does not exist"),
        ("helpers.py", "", "stagekit.helpers has no level"),
        ("runs/__init__.py", "from .new import x", None),
        ("runs/new.py", "from .. import __version__", None),
        ("torch/new.py", "import torch\nfrom ..runs import Run", None),
    ],
)
def test_what_the_check_finds(tmp_path: Path, path: str, source: str, complaint: str | None) -> None:
    for folder in ("store", "shards", "transfer", "runs", "testing", "torch"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "__init__.py").touch()
    (tmp_path / "runs" / "new.py").touch()
    (tmp_path / path).write_text(source)
    assert complaints(tmp_path) == ([complaint] if complaint else [])


def test_a_circle_inside_a_level_is_found(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for name, source in (
        ("__init__", ""),
        ("a", "from . import b"),
        ("b", "def f():\n    from .c import x"),
        ("c", "from ..dataset import D"),
    ):
        (tmp_path / "runs" / f"{name}.py").write_text(source)
    (tmp_path / "dataset.py").write_text("from .runs.a import x")
    assert complaints(tmp_path) == ["a circle: dataset → runs.a → runs.b → runs.c → dataset"]
