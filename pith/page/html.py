"""One self-contained HTML page: no network, no script; dark and light as the reader's system is."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

_STYLE = """
:root{color-scheme:light dark;--page:#fff;--ink:#1f2328;--soft:#57606a;--line:#d0d7de;
--good:#116329;--bad:#b3141b;--first:#0550ae;--second:#b35900}
@media (prefers-color-scheme:dark){:root{--page:#0d1117;--ink:#e6edf3;--soft:#9198a1;
--line:#3d444d;--good:#56d364;--bad:#ff7b72;--first:#79c0ff;--second:#ffa657}}
body{background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif;
max-width:60rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.9rem}
th,td{text-align:left;vertical-align:top;padding:.25rem .75rem .25rem 0;
border-bottom:1px solid var(--line);overflow-wrap:anywhere}
pre{overflow-x:auto}
.good{color:var(--good)}.bad{color:var(--bad);font-weight:bold}
svg{max-width:100%;height:auto;font:12px system-ui,sans-serif}
svg text{fill:var(--soft)}svg .end{text-anchor:end}svg .middle{text-anchor:middle}
svg path{fill:none;stroke:var(--line)}svg .axis{stroke:var(--soft)}
svg .curve0,svg .curve1{stroke:var(--first);stroke-width:2;stroke-linecap:round}
svg .curve1{stroke:var(--second);stroke-dasharray:5 4}
"""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page. `body` is HTML that this module or pith.page.curves made."""

    title: str
    body: str


def page(title: str, sections: Iterable[Section]) -> str:
    """The whole document."""
    parts = (f"<section><h2>{escape(s.title)}</h2>\n{s.body}</section>" for s in sections)
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            *parts,
            "</body></html>\n",
        )
    )


def paragraph(text: str) -> str:
    """Text, escaped."""
    return f"<p>{escape(text)}</p>"


def listing(lines: Sequence[str]) -> str:
    """A line an item, escaped."""
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of texts, escaped. The words held and FAILED have their colours."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>\n{body}</table></div>'


def _cell(value: object) -> str:
    text = "" if value is None else str(value)
    kind = {"held": ' class="good"', "FAILED": ' class="bad"'}.get(text, "")
    return f"<td{kind}>{escape(text)}</td>"
