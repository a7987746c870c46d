"""All rules of the house, one after another."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from pith.errors import Fault
from pith.report import Check
from pith.verify.repository import imports, pages, style
from pith.verify.repository.checkout import GUIDE, TOP_PAGES, Checkout, Source
from pith.verify.repository.pages import Refusal


def check_repository(checkout: Checkout, *, refusal: Refusal) -> Iterator[Check]:
    """One check for each rule that holds, and for each place that breaks one.

    `refusal` says why words are no command line of pith.
    """
    yield from _of_rooms(checkout)
    yield from _of_style(checkout)
    yield from _of_pages(checkout, refusal)


def _of_rooms(checkout: Checkout) -> Iterator[Check]:
    package, sources = checkout.package, checkout.package_sources()
    found = chain.from_iterable(imports.edges(source, package=package) for source in sources)
    yield from _rule("imports between rooms", found, seen=len(sources), unit="files")
    modules = imports.torch_free_modules(package)
    loaded = imports.torch_loaded(modules, root=checkout.root)
    yield from _rule("rooms without torch", loaded, seen=len(modules), unit="modules")
    rows = imports.guide_table(checkout.read(GUIDE))
    yield from _rule("rooms of the guide", rows, seen=len(imports.LAYERS), unit="rooms")


def _of_style(checkout: Checkout) -> Iterator[Check]:
    sources = checkout.package_sources()
    measures: dict[str, Callable[[Source], Iterator[Fault]]] = {
        "file names": style.name,
        "file lengths": style.length,
        "function lengths": style.functions,
        "absolute imports": style.relative_imports,
        "no state in modules": style.state,
    }
    for name, measure in measures.items():
        found = chain.from_iterable(map(measure, sources))
        yield from _rule(name, found, seen=len(sources), unit="files")
    files = [path for path in checkout.files() if path.is_file()]
    found = chain.from_iterable(style.foreign(path, root=checkout.root) for path in files)
    yield from _rule("words about the project alone", found, seen=len(files), unit="files")


def _of_pages(checkout: Checkout, refusal: Refusal) -> Iterator[Check]:
    root, all_pages = checkout.root, checkout.pages()
    lines = pages.commands(checkout)
    refused = pages.refused_commands(lines, refusal=refusal)
    yield from _rule("commands of pages", refused, seen=len(lines), unit="commands")
    targets = pages.make_targets(checkout)
    missing = pages.missing_targets(targets, makefile=checkout.read("Makefile"))
    yield from _rule("make targets of pages", missing, seen=len(targets), unit="targets")
    found = chain.from_iterable(pages.missing_paths(page, root=root) for page in all_pages)
    yield from _rule("paths of pages", found, seen=len(all_pages), unit="pages")
    skills, guide = checkout.skills(), checkout.read(GUIDE)
    found = chain.from_iterable(pages.skill(page, guide=guide) for page in skills)
    yield from _rule("skill pages", found, seen=len(skills), unit="pages")
    yield from _rule("guide for agents", pages.guide(checkout), seen=1, unit="guide")
    yield from _rule("top pages", pages.missing_top(checkout), seen=len(TOP_PAGES), unit="pages")


def _rule(name: str, faults: Iterable[Fault], *, seen: int, unit: str) -> Iterator[Check]:
    """What a rule found among `seen` things; a rule that had nothing to look at did not hold."""
    failed = [Check(name, False, f.found, _wanted(f), f.where) for f in faults]
    if not seen:
        failed.append(Check(name, False, f"no {unit}", f"{unit} to look at"))
    yield from failed or (Check(name, True, f"{seen} {unit}"),)


def _wanted(fault: Fault) -> str:
    return f"{fault.wanted}: {', '.join(fault.nearest)}" if fault.nearest else fault.wanted
