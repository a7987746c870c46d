"""Makes the embedded corpus from the sources of the Python documentation.

    python tools/make_corpus.py SOURCES TARGET

SOURCES is a folder of reStructuredText pages as the HTML build leaves them (`html/_sources`, part
of every built copy of the documentation). TARGET receives `python-docs.jsonl`, one document a page,
and `LICENSE`. The same sources give the same bytes.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

CHAPTERS = ("tutorial", "howto", "faq", "reference", "extending")
LEFT_OUT = {"index", "grammar", "clinic", "cporting", "venv", "interactive", "installed"}
MARKER_ONLY = {"note", "warning", "seealso", "topic", "impl-detail", "rubric", "versionadded"}
MARKER_ONLY |= {"versionchanged", "deprecated", "method", "attribute", "data", "function", "class"}

DIRECTIVE = re.compile(r"\.\. ([\w:-]+)::(.*)")
RULE = re.compile(r"([=\-*~^\"'#+])\1{2,}[\s=\-+]*$")
INLINE = (
    (re.compile(r":[\w:+-]+:`([^`<]*?)\s*<[^`]*>`"), r"\1"),
    (re.compile(r":[\w:+-]+:`[!~]?([^`]*)`"), r"\1"),
    (re.compile(r"``([^`]*)``"), r"\1"),
    (re.compile(r"`([^`<]*?)\s*<[^`]*>`_{0,2}"), r"\1"),
    (re.compile(r"`([^`]*)`_{0,2}"), r"\1"),
    (re.compile(r"(?<!\w)\*{1,2}([^\s*][^*]*)\*{1,2}(?!\w)"), r"\1"),
    (re.compile(r"\|release\|"), "3.11"),
    (re.compile(r"https?://[^\s)]+"), ""),
    (re.compile(r"\\(.)"), r"\1"),
)

NOTICE = """\
python-docs.jsonl holds parts of the documentation of Python {release} ({chapters}).

Copyright (c) 2001-2023 Python Software Foundation; All Rights Reserved

It is distributed under the licence below. Examples, recipes and other code in it are also available
under the Zero-Clause BSD licence.

Summary of changes: markup, indexes, tables, web addresses and blocks of code were removed by
tools/make_corpus.py of the pith repository; each page is stored as one JSON object with its title
and its text. Nothing was added.

{licence}
"""


def prose(source: str) -> str:
    """The running text of one page."""
    text = "\n".join(_without_blocks(source.splitlines()))
    for pattern, replacement in INLINE:
        text = pattern.sub(replacement, text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _without_blocks(lines: list[str]) -> Iterator[str]:
    """Lines of text, left-aligned; directives, comments, code and tables are dropped."""
    hidden_below: int | None = None  # lines indented deeper than this belong to a dropped block
    for line in lines:
        bare = line.strip()
        indent = len(line) - len(line.lstrip())
        if hidden_below is not None and (not bare or indent > hidden_below):
            continue
        hidden_below = None
        kept, hides = _line(bare)
        if hides:
            hidden_below = indent
            yield ""
        if kept is not None:
            yield kept


def _line(bare: str) -> tuple[str | None, bool]:
    """What stays of a line, and whether the deeper lines after it are dropped."""
    if bare.startswith(".."):
        directive = DIRECTIVE.match(bare)
        if directive and directive[1] in MARKER_ONLY:
            return directive[2].strip(), False
        return None, True
    if RULE.match(bare) or bare.startswith((">>>", "... ", "|", "+--", "+==")):
        return None, False
    if re.match(r":\w+: ", bare):
        return None, False
    if bare.endswith("::"):
        return bare[:-1] if bare != "::" else None, True
    return bare, False


def licence(source: str) -> str:
    """The licence of the documentation, cut from its own licence page."""
    start = source.index("PSF LICENSE AGREEMENT FOR PYTHON |release|")
    end = source.index("BEOPEN.COM LICENSE AGREEMENT", start)
    kept = [line for line in source[start:end].splitlines() if line != ".. parsed-literal::"]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept).replace("|release|", "3.11")).strip()


def main(sources: Path, target: Path) -> None:
    """Writes the corpus and its licence into `target`."""
    target.mkdir(parents=True, exist_ok=True)
    with (target / "python-docs.jsonl").open("w", encoding="utf-8", newline="\n") as out:
        for chapter in CHAPTERS:
            for page in sorted((sources / chapter).glob("*.rst.txt")):
                name = page.name.removesuffix(".rst.txt")
                if name not in LEFT_OUT:
                    record = {
                        "title": f"{chapter}/{name}",
                        "text": prose(page.read_text(encoding="utf-8")),
                    }
                    out.write(json.dumps(record, ensure_ascii=False) + "\n")
    terms = licence((sources / "license.rst.txt").read_text(encoding="utf-8"))
    notice = NOTICE.format(release="3.11", chapters=", ".join(CHAPTERS), licence=terms)
    (target / "LICENSE").write_text(notice, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
