"""What a page of HTML holds, as a browser takes it: tags, attributes, text and rows of tables."""

from html.parser import HTMLParser

VOID = {"meta", "br", "input", "link", "img", "hr"}


class Elements(HTMLParser):
    """The tags and attributes of a page, as a browser takes them, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.open: list[str] = []
        self.text = ""
        self.rows: dict[str, str] = {}  # the first cell of each row by the row's name
        self.name = self.cell = ""
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, attrs))
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cell = ""

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "th":
            self.name = self.cell
        elif tag == "td":
            self.rows.setdefault(self.name, self.cell)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("script", "style"):
            return
        self.text += data
        self.cell += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)
