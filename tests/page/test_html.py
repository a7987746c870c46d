"""A page stands alone, and text stays text."""

from html.parser import HTMLParser

from pith.page.html import Section, listing, page, paragraph, table

NASTY = "<script>alert('x')</script> & \"quotes\""


class Reader(HTMLParser):
    """Collects tags, attributes and text, and sees that every tag is closed in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(document: str) -> Reader:
    reader = Reader()
    reader.feed(document)
    assert reader.open == []
    return reader


def test_text_is_escaped_wherever_it_stands() -> None:
    body = paragraph(NASTY) + listing([NASTY]) + table([NASTY], [[NASTY], [None], [3]])
    reader = read(page(NASTY, [Section(NASTY, body)]))

    assert reader.text.count(NASTY) == 7
    assert "script" not in reader.tags


def test_a_page_needs_nothing_from_elsewhere_and_follows_the_readers_colours() -> None:
    document = page("title", [Section("one", paragraph("text")), Section("two", "")])
    reader = read(document)

    assert not reader.tags & {"script", "link", "img", "iframe"}
    assert not reader.attributes & {"src", "href"}
    assert "url(" not in document
    assert "//" not in document
    assert "prefers-color-scheme:dark" in document
    assert document.startswith("<!doctype html>")


def test_only_the_words_of_a_check_are_coloured() -> None:
    cells = table(["check"], [["held"], ["FAILED"], ["was held"]])

    assert cells.count('class="good"') == 1
    assert cells.count('class="bad"') == 1
