"""Sentence pairs from wherever they lie: text files, tables, Hugging Face datasets, sacreBLEU's test sets, the demo.

Text is read as bytes and split on `\\n` alone: Python's own line ends (U+2028, U+0085, VT, FF, a lone CR) occur
inside sentences of real corpora and would shift one side against the other. What cannot be read stops with file:line;
nothing is skipped in silence. One pass, constant memory; the order is that of the source.
"""

import contextlib
import difflib
import gzip
import json
import lzma
import socket
import sys
import urllib.error
import urllib.request
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

from nmt.config import CleanConfig, CorpusConfig, DataConfig
from nmt.errors import UserError

if TYPE_CHECKING:
    import pyarrow

BOM = b"\xef\xbb\xbf"
ROWS = 4096  # of a table at a time
PATIENCE_S = 5.0  # how long a server may stay silent


class Pair(NamedTuple):
    src: str
    tgt: str


def describe(corpus: CorpusConfig) -> str:
    """A short name for messages and the ledger."""
    if corpus.src is not None:
        return f"{corpus.src} + {corpus.tgt}"
    if corpus.dataset is not None:
        return " ".join(part for part in (corpus.dataset, corpus.subset, corpus.split or "train") if part)
    return corpus.file or (f"sacrebleu {corpus.sacrebleu}" if corpus.sacrebleu else f"demo {corpus.demo}")


def read_pairs(corpus: CorpusConfig, data: DataConfig) -> Iterator[Pair]:
    """The raw pairs of `corpus` from data.src to data.tgt, in order, once."""
    if corpus.dataset is not None:
        return _pairs_of_tables(_tables_of_dataset(corpus, data), data, describe(corpus))
    if corpus.sacrebleu is not None:
        return _pairs_of_two_files(*_files_of_test_set(corpus.sacrebleu, f"{data.src}-{data.tgt}"))
    if corpus.demo is not None:
        return _pairs_of_demo(corpus.demo, data)
    paths = local_files(corpus, data)
    if len(paths) == 2:
        return _pairs_of_two_files(*paths)
    kind = paths[0].name.removesuffix(".gz").removesuffix(".xz").rpartition(".")[2]
    if kind == "tsv":
        return _pairs_of_tsv(paths[0])
    if kind == "jsonl":
        return _pairs_of_jsonl(paths[0], data)
    if paths[0].suffix == ".parquet":
        return _pairs_of_tables(_tables_of_parquet(paths[0]), data, str(paths[0]))
    raise UserError(f"{paths[0]}: not a .tsv, .jsonl or .parquet file; two text files are given as src: and tgt:")


def local_files(corpus: CorpusConfig, data: DataConfig) -> list[Path]:
    """The files on this machine that `corpus` reads; `UserError` where one is missing."""
    if corpus.dataset is not None:
        return _files_of_dataset(corpus, data)
    paths = [Path(data.root) / name for name in (corpus.src, corpus.tgt, corpus.file) if name is not None]
    for path in paths:
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "not found"
            raise UserError(f"{path}: {what}; give a file, relative paths start from data.root={data.root}")
    return paths


def clean(pairs: Iterable[Pair], rules: CleanConfig, dropped: Counter[str]) -> Iterator[Pair]:
    """The stripped pairs that keep the rules; the others are counted in `dropped` by the first rule they break."""
    longest = sys.maxsize if rules.max_words is None else rules.max_words
    for src, tgt in pairs:
        n_src, n_tgt = len(src.split()), len(tgt.split())
        if not n_src or not n_tgt:
            dropped["empty side"] += 1
        elif max(n_src, n_tgt) > longest:
            dropped[f"more than {longest} words"] += 1
        elif rules.max_ratio is not None and max(n_src, n_tgt) > rules.max_ratio * min(n_src, n_tgt):
            dropped[f"length ratio above {rules.max_ratio:g}"] += 1
        else:
            yield Pair(src.strip(), tgt.strip())


# ---- text files -------------------------------------------------------------------------------------------------

def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    return cast(IO[bytes], lzma.open(path, "rb")) if path.suffix == ".xz" else open(path, "rb")


def decoded(file: IO[bytes], name: str) -> Iterator[str]:
    """The lines of UTF-8 bytes: split on `\\n` alone, one trailing CR dropped, a byte order mark at the start too."""
    for n, line in enumerate(file, 1):
        line = line.removeprefix(BOM) if n == 1 else line
        try:
            yield line.removesuffix(b"\n").removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{name}:{n}: not valid UTF-8: 0x{line[error.start]:02x} at byte {error.start + 1} "
                            "of the line; convert it to UTF-8") from None


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file; an empty one is refused."""
    n = 0
    try:
        with _open(path) as file:
            for n, line in enumerate(decoded(file, str(path)), 1):  # noqa: B007
                yield line
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: corrupt after line {n} ({error}); fetch or pack it again") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if n == 0:
        raise UserError(f"{path}: empty; it should hold one sentence per line")


def _pairs_of_two_files(src: Path, tgt: Path) -> Iterator[Pair]:
    sides = read_lines(src), read_lines(tgt)
    for n, (a, b) in enumerate(zip_longest(*sides), 1):
        if a is None or b is None:
            longer = n + sum(1 for _ in sides[a is None])
            n_src, n_tgt = (n - 1, longer) if a is None else (longer, n - 1)
            raise UserError(f"{src} has {n_src:,} lines but {tgt} has {n_tgt:,}; "
                            "line n of one must be the translation of line n of the other")
        yield Pair(a, b)


def _pairs_of_tsv(path: Path) -> Iterator[Pair]:
    for n, line in enumerate(read_lines(path), 1):
        cells = line.split("\t")
        if len(cells) != 2:
            raise UserError(f"{path}:{n}: {len(cells) - 1} tabs instead of one; a line is source, tab, target")
        yield Pair(*cells)


def _pairs_of_jsonl(path: Path, data: DataConfig) -> Iterator[Pair]:
    for n, line in enumerate(read_lines(path), 1):
        place = f"{path}:{n}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place}: not JSON ({error}); a line is an object like {_example(data)}") from None
        if not isinstance(row, dict):
            raise UserError(f"{place}: {line[:40]} is not an object like {_example(data)}")
        inner = row.get("translation")
        cells = {f"translation.{key}": value for key, value in inner.items()} if isinstance(inner, dict) else row
        src, tgt = _columns(list(cells), data, place)
        yield Pair(_one_line(cells[src], src, place), _one_line(cells[tgt], tgt, place))


# ---- tables -----------------------------------------------------------------------------------------------------

def _example(data: DataConfig) -> str:
    return f'{{"{data.src}": "...", "{data.tgt}": "..."}}'


def _columns(names: Sequence[str], data: DataConfig, place: str) -> tuple[str, str]:
    """Which two of the columns are the source and the target."""
    known = (f"translation.{data.src}", f"translation.{data.tgt}"), (data.src, data.tgt), ("src", "tgt")
    for src, tgt in known:
        if src in names and tgt in names:
            return src, tgt
    found = ", ".join(map(repr, names)) or "none"
    raise UserError(f"{place}: no columns {data.src!r} and {data.tgt!r}, but {found}; "
                    "name them after data.src and data.tgt, or 'src' and 'tgt'")


def _one_line(value: Any, column: str, place: str) -> str:
    """The text of a cell. A line break inside it becomes a space: from here on a sentence is a line."""
    if not isinstance(value, str):
        raise UserError(f"{place}: {column} is {'null' if value is None else repr(value)[:40]} instead of text; "
                        "mend or remove the row")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{place}: {column} holds half a character (lone surrogate "
                            f"U+{ord(value[error.start]):04X}); mend or remove the row") from None
    return value.removesuffix("\n").removesuffix("\r").replace("\n", " ")


def _pairs_of_tables(tables: Iterable["pyarrow.Table"], data: DataConfig, name: str) -> Iterator[Pair]:
    n = 0
    for table in tables:
        table = table.flatten()  # a struct column becomes columns `translation.de`, `translation.en`
        src, tgt = _columns(table.column_names, data, name)
        try:
            columns = table[src].to_pylist(), table[tgt].to_pylist()
        except UnicodeDecodeError:
            raise UserError(f"{name}: not valid UTF-8 in one of the rows {n + 1:,} to {n + len(table):,}") from None
        for a, b in zip(*columns, strict=True):
            n += 1
            yield Pair(_one_line(a, src, f"{name}: row {n}"), _one_line(b, tgt, f"{name}: row {n}"))
    if n == 0:
        raise UserError(f"{name}: empty; it should hold one pair per row")


def _tables_of_parquet(path: Path) -> Iterator["pyarrow.Table"]:
    import pyarrow
    from pyarrow import parquet
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            for batch in file.iter_batches(ROWS):
                yield pyarrow.Table.from_batches([batch])
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable parquet file ({_first_line(error)}); fetch it again") from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# ---- Hugging Face -----------------------------------------------------------------------------------------------

def _dataset_arguments(corpus: CorpusConfig, data: DataConfig) -> tuple[bool, dict[str, Any]]:
    """What `datasets` is asked for: a folder below data.root if there is one of that name, else an id of the hub."""
    folder = Path(data.root) / str(corpus.dataset)
    if not folder.is_dir():
        return False, {"path": corpus.dataset, "name": corpus.subset, "revision": corpus.revision}
    if corpus.subset and (folder / corpus.subset).is_dir() and not (folder / "README.md").is_file():
        return True, {"path": str(folder / corpus.subset)}  # only a README can tell `datasets` of subsets
    return True, {"path": str(folder), "name": corpus.subset}


def _files_of_dataset(corpus: CorpusConfig, data: DataConfig) -> list[Path]:
    is_local, arguments = _dataset_arguments(corpus, data)
    if not is_local:
        return []
    with _hub(corpus, is_local) as datasets:
        files = datasets.load_dataset_builder(**arguments).config.data_files or {}
    return sorted(Path(name) for name in files.get(corpus.split or "train", []))


def _tables_of_dataset(corpus: CorpusConfig, data: DataConfig) -> Iterator["pyarrow.Table"]:
    is_local, arguments = _dataset_arguments(corpus, data)
    with _hub(corpus, is_local) as datasets:  # streaming reads a local folder as it lies, without a copy in the cache
        rows = datasets.load_dataset(**arguments, split=corpus.split or "train", streaming=is_local)
        yield from rows.with_format("arrow").iter(batch_size=ROWS)


@contextlib.contextmanager
def _hub(corpus: CorpusConfig, is_local: bool) -> Iterator[Any]:
    """`datasets`, quiet, its failures told in one line. If the hub does not answer at once only its cache is used:
    left to itself, `datasets` tries for 23 seconds."""
    import datasets
    import huggingface_hub
    datasets.logging.set_verbosity_error()
    huggingface_hub.logging.set_verbosity_error()
    if is_local or not sys.stderr.isatty():
        datasets.disable_progress_bars()
    settings = huggingface_hub.constants
    if not is_local and not settings.HF_HUB_OFFLINE and not _answers(settings.ENDPOINT):
        settings.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield datasets
    except UserError:
        raise
    except ConnectionError:
        raise UserError(
            f"dataset {corpus.dataset}: Hugging Face cannot be reached and there is no copy in its cache; give local "
            "files instead, data.train=[{src: FILE, tgt: FILE}], or parquet files in the hub's layout, "
            f"FOLDER/{corpus.subset or 'data'}/{corpus.split or 'train'}-00000-of-00001.parquet, as dataset: FOLDER"
        ) from None
    except Exception as error:  # whatever a foreign dataset can do wrong, in its own words
        raise UserError(f"dataset {describe(corpus)}: {_first_line(error)}") from None


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=PATIENCE_S).close()
    except urllib.error.HTTPError:
        return True  # an answer, if not a friendly one
    except OSError:
        return False
    return True


# ---- sacreBLEU and the demo -------------------------------------------------------------------------------------

def _files_of_test_set(name: str, langpair: str) -> tuple[Path, Path]:
    """Source and first reference of a test set, downloaded by sacreBLEU if it has to be."""
    import sacrebleu
    from sacrebleu.dataset import DATASETS
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, 3) or ["wmt14/full"]
        raise UserError(f"sacrebleu: {name!r} is not a test set it knows; did you mean {' or '.join(close)}?")
    if langpair not in DATASETS[name].langpairs:
        raise UserError(f"sacrebleu: {name} has no {langpair}, only {', '.join(DATASETS[name].langpairs)}")
    patience = socket.getdefaulttimeout()
    socket.setdefaulttimeout(PATIENCE_S)  # sacreBLEU sets none
    try:
        src, tgt = sacrebleu.get_source_file(name, langpair), sacrebleu.get_reference_files(name, langpair)[0]
    except (Exception, SystemExit) as error:  # it exits where a download is damaged
        folder = Path(sacrebleu.SACREBLEU_DIR, name)
        raise UserError(f"sacrebleu: {name} cannot be had ({_first_line(error)}); give local files instead, "
                        f"{{src: FILE, tgt: FILE}}, or remove {folder}, if it holds half, and try again") from None
    finally:
        socket.setdefaulttimeout(patience)
    return Path(src), Path(tgt)


def _pairs_of_demo(split: str, data: DataConfig) -> Iterator[Pair]:
    from nmt.data import demo
    if {data.src, data.tgt} != {"en", "de"}:
        raise UserError(f"demo: the embedded corpus is English-German, not data.src={data.src} data.tgt={data.tgt}")
    for english, german in demo.pairs(split):
        yield Pair(english, german) if data.src == "en" else Pair(german, english)
