"""Docstrings and comments are written in plain words, and a public name has one definition."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2] / "verl"
SEEN_PER_1000 = 3
PERSONS_AND_POSTURES = frozenset(
    [
        *("nobody", "who", "whom", "whose", "whoever", "told", "tells", "said", "says", "heard", "asked"),
        *("comes", "goes", "gone", "stands", "lies", "lay"),
    ]
)
"""Words with which a text describes programs as persons. The field has its own terms for what they do."""
TOKEN = re.compile(
    r"""\"{3}(?:[^\\]|\\.)*?\"{3}|'{3}(?:[^\\]|\\.)*?'{3}|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|#[^\n]*""", re.DOTALL
)
"""A string of Python or a comment."""
FRAGMENT = re.compile(r"\s*(Of|What|Whether|See)\b")

ONE_NAME_EACH = {
    "build": "makes the engine of a row of config/backends.py, whose module has it under this name",
    "Options": "has the keys of the engine of a row of config/backends.py",
    "memory": "estimates the memory of the engine of a row of config/backends.py",
    "open_weights": "opens a published version of the weights, by the module that the publisher names",
    "serve_command": "is the command line of one kind of server",
    "main": "is the entry point of a program",
    "compute_score": "is verl's name of a reward function",
}
"""Names that several modules define because something looks them up in each: a hook -> what it is."""


@cache
def trees() -> dict[Path, ast.Module]:
    return {path.relative_to(ROOT): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


@cache
def sources() -> dict[str, tuple[str, ast.Module]]:
    """Return (text, tree) of each module of verl, the tests, the benches and the examples, by its path."""
    folders = (ROOT, *(ROOT.parent / name for name in ("tests", "bench", "examples")))
    texts = {path: path.read_text() for folder in folders for path in sorted(folder.rglob("*.py"))}
    return {str(path.relative_to(ROOT.parent)): (text, ast.parse(text)) for path, text in texts.items()}


def strings(tree: ast.Module) -> list[str]:
    """Return the docstrings, those of fields and constants included."""
    alone = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    return [node.value for node in alone if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def comments(text: str) -> list[str]:
    """Return the comments. `tokenize` finds them in five times the time."""
    return [found[0] for found in TOKEN.finditer(text) if found[0][0] == "#"]


def words_of(text: str, tree: ast.Module) -> list[str]:
    """Return the words of the docstrings and comments of a module, in lower case."""
    return re.findall(r"[a-z']+", " ".join([*strings(tree), *comments(text)]).lower())


def too_many(words: list[str]) -> list[str]:
    """Return the words that describe programs as persons, if they are more than one and more than their share."""
    found = [word for word in words if word in PERSONS_AND_POSTURES]
    return found if len(found) > max(1, SEEN_PER_1000 * len(words) / 1000) else []


def test_texts_use_the_terms_of_the_field() -> None:
    found = {path: bad for path, (text, tree) in sources().items() if (bad := too_many(words_of(text, tree)))}
    assert not found, f"write what the program does: {found}"


def test_docstrings_are_sentences() -> None:
    """`Return whether the queue is full.`, not `Whether it is full.`"""
    found = {
        str(path): bad
        for path, tree in trees().items()
        if (bad := [text[:60] for text in strings(tree) if FRAGMENT.match(text)])
    }
    assert not found, f"begin with a verb or with the thing: {found}"


def test_a_public_name_has_one_definition() -> None:
    """A hook may be defined in several modules; any other class or function has a name of its own."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
                found[node.name].append(str(path))
    several = {name: paths for name, paths in found.items() if len(paths) > 1}
    assert not ONE_NAME_EACH.keys() - several.keys(), "a hook with one definition needs no line"
    twice = {name: paths for name, paths in several.items() if name not in ONE_NAME_EACH}
    assert not twice, f"give each its own name: {twice}"


def test_the_words_are_counted() -> None:
    """A module with two of the words in forty is found, one with a single one is not."""
    text = '"""The queue says %s it holds."""\n# a row that lies there\nN = 1  # of the field\n'
    assert too_many(words_of(text % "what", ast.parse(text % "what"))) == ["says", "lies"]
    assert too_many(words_of('"""It says so."""', ast.parse('"""It says so."""'))) == []
    assert FRAGMENT.match("Whether it is full.") and not FRAGMENT.match("Offset of a row.")


DOCS = ROOT.parent / "docs"
DOCS_PER_1000 = 3
PATH = re.compile(r"`([\w./]+/\w+\.(?:py|tsv))`")
"""A path on the page of the design, relative to verl/ or to the repository."""
NAMES_OF_THE_PUBLIC_PROJECT = frozenset(
    {"experimental", "interactions", "model_merger", "models", "recipes", "single_controller", "trainer", "utils"}
)
"""Small packages with the names that scripts of the public project import, models for tests, and recipes."""


def prose(page: str) -> str:
    """Return a page without its code."""
    return re.sub(r"```.*?```|`[^`]*`", "", page, flags=re.DOTALL)


def persons_of_page(page: str) -> list[str]:
    """Return the words that describe programs as persons, if they are more than two and more than their share."""
    words = re.findall(r"[a-z']+", prose(page).lower())
    found = [word for word in words if word in PERSONS_AND_POSTURES]
    return found if len(found) > max(2, DOCS_PER_1000 * len(words) / 1000) else []


def test_pages_use_the_terms_of_the_field() -> None:
    """All pages but those of docs/algorithms, which bench/cards.py writes."""
    root = ROOT.parent
    pages = [
        *root.glob("*.md"),
        *DOCS.glob("*.md"),
        *(DOCS / "decisions").glob("*.md"),
        *(DOCS / "design").glob("*.md"),
    ]
    assert len(pages) > 27
    found = {str(page.relative_to(root)): bad for page in pages if (bad := persons_of_page(page.read_text()))}
    assert not found, f"write what the program does: {found}"


def test_the_words_of_a_page_are_counted() -> None:
    assert persons_of_page("The queue says who comes.\n") == ["says", "who", "comes"]
    assert persons_of_page("```\nsays who\n```\nA server, `comes`, and a test that says it.\n") == []


def test_the_page_of_the_design_names_files_that_exist() -> None:
    """Paths relative to the package, and in the table of packages relative to the package of the row."""
    text = (DOCS / "design" / "README.md").read_text()
    paths = {path.removeprefix("verl/") for path in PATH.findall(text)}
    for line in text.splitlines():
        if row := re.match(r"\| (top level|`[a-z_/]+/`) \| ", line):
            package = "" if row[1] == "top level" else row[1].strip("`")
            paths |= {package + name for name in re.findall(r"`(\w+(?:\.py|/))`", line[row.end() :])}
    assert len(paths) > 100
    missing = sorted(path for path in paths if not any((root / path).exists() for root in (ROOT, ROOT.parent)))
    assert not missing, f"docs/design/README.md: no such file: {missing}"


def test_every_package_is_on_the_page_of_the_design() -> None:
    """Packages with names that scripts of the public project import are described in docs/from_verl.md."""
    text = (DOCS / "design" / "README.md").read_text()
    packages = {path.parts[0] for path in trees() if len(path.parts) > 1} - NAMES_OF_THE_PUBLIC_PROJECT
    assert not {name for name in packages if f"`{name}/" not in text}


NAMES_OF_OTHERS = {"NOBODY": "the user of Unix with this name"}


def names_of(tree: ast.Module) -> set[str]:
    """Return the names that a module gives to functions, classes, parameters, variables and attributes."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


def test_names_are_plain_words_too() -> None:
    every = ((str(path), name) for path, tree in trees().items() for name in names_of(tree))
    odd = {(path, name) for path, name in every if {*name.lower().split("_")} & PERSONS_AND_POSTURES}
    assert {name for _, name in odd} == {*NAMES_OF_OTHERS}, odd
