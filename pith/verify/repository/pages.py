"""Pages say what is true: commands parse, targets and paths exist, skills have their form."""

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pith.errors import Fault
from pith.verify.repository.checkout import GUIDE, TOP_LEVEL, TOP_PAGES, Checkout

Refusal = Callable[[Sequence[str]], str]  # words of a command -> why it is none, "" where it is one

HEADINGS = ("When", "Needs", "Do", "Success", "If it fails", "Never")
KEYS = ("name", "description", "metadata")
MAX_DESCRIPTION = 500
MAX_SKILL_LINES = 150
MAX_GUIDE_LINES = 120
CLAUDE = ".claude/CLAUDE.md"


def shell_lines(page: str) -> list[str]:
    """The lines of the shell blocks of a page, comments taken off."""
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", page, flags=re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).split("\n")
    return [line for line in (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines) if line]


def commands(checkout: Checkout) -> list[tuple[str, str]]:
    """Every `pith` command line of the pages, with the page that it stands on."""
    return [
        (_place(page, checkout), line)
        for page in checkout.pages()
        for line in shell_lines(page.read_text())
        if line.startswith("pith ")
    ]


def refused_commands(lines: Sequence[tuple[str, str]], *, refusal: Refusal) -> Iterator[Fault]:
    """The command lines that `pith` would not take."""
    for where, line in lines:
        try:
            reason = refusal(shlex.split(line)[1:])
        except ValueError as error:  # a quote that is not closed
            reason = str(error)
        if reason:
            yield Fault(where, f"{line}: {reason}", "a command that pith takes")


def make_targets(checkout: Checkout) -> list[tuple[str, str]]:
    """Every `make` target that a page names, with the page."""
    pattern = re.compile(r"(?:^|`)(?:\w+=\S+ )?make ([\w-]+)", flags=re.MULTILINE)
    return [
        (_place(page, checkout), target)
        for page in checkout.pages()
        for target in pattern.findall(page.read_text())
    ]


def missing_targets(named: Sequence[tuple[str, str]], *, makefile: str) -> Iterator[Fault]:
    """The targets that are not in the text of the Makefile."""
    targets = tuple(re.findall(r"^([\w-]+):", makefile, flags=re.MULTILINE))
    for where, target in named:
        if target not in targets:
            yield Fault(where, f"make {target}", "a target of the Makefile", targets)


def missing_paths(page: Path, *, root: Path) -> Iterator[Fault]:
    """Paths of the project that a page names and that are not there."""
    pattern = rf"(?<![\w./-])(?:{'|'.join(TOP_LEVEL)})/[\w./-]*\w"
    for path in sorted(set(re.findall(pattern, page.read_text()))):
        if not (root / path).exists():
            yield Fault(page.relative_to(root).as_posix(), path, "a path that exists")


def skill(page: Path, *, guide: str) -> Iterator[Fault]:
    """What in a skill page breaks its form; and that `guide`, the text of AGENTS.md, lists it."""
    text, where = page.read_text(), f"skills/{page.name}"
    head = frontmatter(text)
    title, description = head.get("name", ""), head.get("description", "")
    if title != page.stem or not re.fullmatch(r"[a-z0-9-]{1,64}", page.stem):
        yield Fault(where, f"name {title!r}", "the name of the file in a-z, 0-9 and -")
    if not 0 < len(description) <= MAX_DESCRIPTION:
        found = f"a description of {len(description)} characters"
        yield Fault(where, found, f"1 to {MAX_DESCRIPTION}")
    if strange := sorted(set(head) - set(KEYS)):
        yield Fault(where, f"keys {', '.join(strange)}", f"own keys under {KEYS[-1]}")
    headings = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    if headings != list(HEADINGS):
        yield Fault(where, f"headings {', '.join(headings)}", ", ".join(HEADINGS))
    if (lines := text.count("\n")) > MAX_SKILL_LINES:
        yield Fault(where, f"length {lines} lines", f"at most {MAX_SKILL_LINES}")
    if where not in guide:
        yield Fault(where, f"not listed in {GUIDE}", "a row of its table of skills")


def frontmatter(page: str) -> dict[str, str]:
    """The plain keys between the two rules at the top of a page; none where it has no such top."""
    if not page.startswith("---\n") or page.count("---\n") < 2:
        return {}
    _, head, _ = page.split("---\n", 2)
    return dict(re.findall(r"^(\w+): ?(.*)$", head, flags=re.MULTILINE))


def guide(checkout: Checkout) -> Iterator[Fault]:
    """AGENTS.md is short, and the page that agents open on their own leads to it."""
    lines = checkout.read(GUIDE).count("\n")
    if not 0 < lines <= MAX_GUIDE_LINES:
        yield Fault(GUIDE, f"{lines} lines", f"1 to {MAX_GUIDE_LINES}")
    target = checkout.read(CLAUDE).strip().removeprefix("@")
    if (checkout.root / CLAUDE).parent.joinpath(target).resolve() != checkout.root / GUIDE:
        yield Fault(CLAUDE, repr(target), f"the one line that imports {GUIDE}")


def missing_top(checkout: Checkout) -> Iterator[Fault]:
    """The pages that every checkout has and this one lacks."""
    for name in TOP_PAGES:
        if not checkout.read(name):
            yield Fault(name, "no such page", "a page with words in it")


def _place(page: Path, checkout: Checkout) -> str:
    return page.relative_to(checkout.root).as_posix()
