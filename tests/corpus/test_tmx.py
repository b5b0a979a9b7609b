"""TMX against pairs written by hand: languages, markup, packing, and files that want to do harm."""

import resource
from collections.abc import Sequence
from pathlib import Path

from pytest import mark, raises
from support.packing import pack, pack_archive

from nmt.config import CorpusConfig, DataConfig
from nmt.corpus.reader import Pair, read_blocks, read_pairs
from nmt.corpus.tmx import TmxReader
from nmt.system.errors import UserError

HEAD = '<?xml version="1.0" encoding="UTF-8"?>\n<!DOCTYPE tmx SYSTEM "tmx14.dtd">\n<tmx version="1.4">\n'
HEAD += '<header srclang="en"/>\n<body>\n'
TAIL = "</body>\n</tmx>\n"


def unit(*sides: tuple[str, str], attribute: str = "xml:lang") -> str:
    tuvs = "".join(f'<tuv {attribute}="{lang}"><seg>{text}</seg></tuv>' for lang, text in sides)
    return f"<tu>{tuvs}</tu>\n"


def read(body: str, src: str = "en", tgt: str = "de", size: int = 7) -> list[tuple[str, str]]:
    """As it comes in blocks of a few bytes."""
    reader = TmxReader("x.tmx", DataConfig(src=src, tgt=tgt))
    content = (HEAD + body + TAIL).encode()
    pairs = []
    for i in range(0, len(content), size):
        pairs += reader.feed(content[i : i + size])
    return pairs + reader.feed(b"", is_last=True)


@mark.parametrize(
    "sides, src, tgt, pair",
    [
        ((("en", "a"), ("de", "b")), "en", "de", ("a", "b")),
        ((("DE", "b"), ("EN-us", "a")), "en", "de", ("a", "b")),
        ((("en_GB", "a"), ("en", "c"), ("de-AT", "b"), ("de-DE", "d")), "en", "de", ("c", "b")),
        ((("pt-BR", "b"), ("pt-PT", "a")), "pt", "pt-br", ("a", "b")),
        ((("eng", "x"), ("de", "b")), "en", "de", None),
        ((("en", "a"), ("fr", "b")), "en", "de", None),
    ],
)
@mark.parametrize("attribute", ["xml:lang", "lang"])
def test_languages_are_found_however_they_are_written(
    sides: Sequence[tuple[str, str]],
    src: str,
    tgt: str,
    pair: tuple[str, str] | None,
    attribute: str,
) -> None:
    assert read(unit(*sides, attribute=attribute), src, tgt) == ([pair] if pair else [])


@mark.parametrize(
    "seg, text",
    [
        ("x &amp; y &lt;z&gt; &#228; <![CDATA[<b>]]>", "x & y <z> \u00e4 <b>"),
        (
            'Click <bpt i="1">&lt;b&gt;</bpt>here<ept i="1">&lt;/b&gt;</ept> <hi>now</hi>',
            "Click here now",
        ),
        ('a<ph>{0}<sub>tip</sub></ph>b<it pos="begin">x</it><ut>y</ut>', "ab"),
        ("\n    two\n    lines  \n", "two lines"),
        ("U+2028 \u2028 stays\t.", "U+2028 \u2028 stays\t."),
        ("", ""),
    ],
)
def test_text_stays_and_markup_goes(seg: str, text: str) -> None:
    for size in (1, 1_000):
        assert read(unit(("en", seg), ("de", "b")), size=size) == [(text, "b")]


@mark.parametrize("suffix", [".gz", ".zip", ".utf-16"])
def test_the_reader_takes_it_packed_and_in_blocks(suffix: str, tmp_path: Path) -> None:
    pairs = [Pair(f"source {i}", f"Ziel {i} \u00e4") for i in range(10)]
    text = HEAD + "".join(unit(("en", src), ("de", tgt)) for src, tgt in pairs) + TAIL
    corpus = CorpusConfig(file="x.tmx")
    if suffix == ".utf-16":
        (tmp_path / "x.tmx").write_bytes(text.replace("UTF-8", "utf-16").encode("utf-16"))
    elif suffix == ".gz":
        corpus = CorpusConfig(file="x.tmx.gz")
        (tmp_path / "x.tmx.gz").write_bytes(pack(text.encode(), suffix))
    else:
        corpus = CorpusConfig(archive="x.zip", file="inner/x.tmx")
        (tmp_path / "x.zip").write_bytes(pack_archive({"inner/x.tmx": text.encode()}, "x.zip"))
    data = DataConfig(root=str(tmp_path))
    assert list(read_pairs(corpus, data)) == pairs
    *_, block = read_blocks(corpus, data, 4)
    assert block.src == [pair.src for pair in pairs[8:]] and block.share == 1


UNREAD = r"x\.tmx: is in an encoding that cannot be read \(.*\); convert it to UTF-8"
ENCODINGS = (
    "GB2312",
    "Shift_JIS",
    "big5",
    "utf-7",
    "hex",
    "idna",
    "undefined",
    "nonsense",
    "utf-32",
)
BOMB = '<!DOCTYPE tmx [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;">]>'


@mark.parametrize(
    "content, message",
    [
        (HEAD + unit(("en", "a & b"), ("de", "c")) + TAIL, r"x\.tmx:6:\d+: is not well-formed XML"),
        (HEAD + unit(("en", "a"), ("de", "b")), r"x\.tmx:7:1: is not well-formed XML \(no element"),
        ("<a>" * 200_000, "is not well-formed XML"),
        (HEAD + "<tu><tuv><seg>" + "<hi>" * 200_000, "is not well-formed XML"),
        (f"{BOMB}<tmx/>", r"x\.tmx:1: declares or uses the entity 'a'"),
        ('<!DOCTYPE t [<!ENTITY a SYSTEM "/etc/passwd">]><t>&a;</t>', "uses the entity 'a'"),
        (HEAD + unit(("en", "a &auml;"), ("de", "c")) + TAIL, "x.tmx:6: .* the entity 'auml'"),
        (
            HEAD + unit(("en", "a"), ("fr", "b")) + TAIL,
            r"no pair from en to de \(languages found: en, fr\)",
        ),
        ("", "is not well-formed XML"),
        *((f'<?xml version="1.0" encoding="{name}"?><tmx/>', UNREAD) for name in ENCODINGS),
    ],
)
def test_what_is_wrong_is_named(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.tmx").write_text(content)
    data = DataConfig(root=str(tmp_path), on_bad_line="skip")
    with raises(UserError, match=message):
        list(read_pairs(CorpusConfig(file="x.tmx"), data))


def test_memory_does_not_grow_with_the_file() -> None:
    reader = TmxReader("x.tmx", DataConfig())
    block = "".join(unit(("en", f"word {i} " * 20), ("de", "w")) for i in range(500)).encode()
    reader.feed(HEAD.encode())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    n = sum(len(reader.feed(block)) for _ in range(300))  # 40 MB
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert n == 150_000 and after - before < 10_000  # kB
