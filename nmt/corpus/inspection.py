"""What a store holds, for people: its ledger, what each rule dropped, lengths, pieces per word, a few pairs.

Everything is counted from the store alone, chunk by chunk, so that 36 million pairs need little memory and neither
corpora nor torch; every figure is exact. A damaged store is refused, not described. Text of corpora is shown with its
control and direction marks written out, so that nothing in it can act on the terminal.
"""

import importlib.util
import io
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nmt.corpus.ledger import ledger_table
from nmt.data.store import Side, TokenStore, open_store
from nmt.data.vocab import SPACE, UNK, Vocab
from nmt.system.errors import UserError
from nmt.system.files import check_writable, read_json, verify, write_bytes
from nmt.system.run_folder import LEDGER_FILE, MANIFEST_FILE, VOCAB_FILE, ids_file

SIDES = ("src", "tgt")
CHUNK = 1 << 22  # ids or sentences in memory at a time
BINS = 20  # at most, of a histogram; one more holds all that is longer
PAIRS = 5  # decoded ones
Json = dict[str, Any]
Lengths = list[tuple[int, int]]  # (length, sentences of that length), ascending


def inspect(folder: Path) -> Json:
    """All that `described` and `plot` show, as plain values."""
    train = open_store(folder, "train")
    verify(folder)
    vocab = Vocab.load(folder / VOCAB_FILE)
    splits = {"train": train}
    if ids_file("valid", "src") in read_json(folder / MANIFEST_FILE):
        splits["valid"] = open_store(folder, "valid")
    ledger = read_json(folder / LEDGER_FILE)
    if "store" not in ledger:
        raise UserError(f"{folder}: made by an older version of nmt-prepare; prepare it again")
    words = np.array([piece.count(SPACE) for piece in vocab.pieces(range(vocab.size))])
    return {
        "store": str(folder),
        "ledger": ledger,
        "splits": {
            name: {"src": _measured(store.src, words), "tgt": _measured(store.tgt, words)}
            for name, store in splits.items()
        },
        "pairs": [_pair(train, i, vocab) for i in _spread(len(train), PAIRS)],
    }


def _measured(side: Side, words: np.ndarray) -> Json:
    """The figures of one side; `words[i]` is the number of words that begin in piece i."""
    lengths: Counter[int] = Counter()
    for i in range(0, len(side), CHUNK):
        n = np.bincount(np.diff(side.offsets[i : i + CHUNK + 1]))
        lengths.update({int(length): int(n[length]) for length in np.flatnonzero(n)})
    pieces = np.zeros(len(words), np.int64)
    for i in range(0, len(side.ids), CHUNK):
        n = np.bincount(side.ids[i : i + CHUNK], minlength=len(words))
        if len(n) > len(words):
            raise UserError(
                f"store: id {len(n) - 1} is beyond its BPE of {len(words)} pieces; damaged, prepare again"
            )
        pieces += n
    n_pieces, n_words, in_order = len(side.ids), int(pieces @ words), sorted(lengths.items())
    return {
        "sentences": len(side),
        "pieces": n_pieces,
        "words": n_words,
        "unk": int(pieces[UNK]),
        "mean": n_pieces / max(len(side), 1),
        "pieces_per_word": n_pieces / max(n_words, 1),
        "unk_share": int(pieces[UNK]) / max(n_pieces, 1),
        "median": percentile(in_order, 50),
        "p90": percentile(in_order, 90),
        "p99": percentile(in_order, 99),
        "longest": max(lengths, default=0),
        "lengths": in_order,
    }


def percentile(lengths: Lengths, percent: int) -> int:
    """The smallest length that at least so many percent of the sentences do not exceed."""
    wanted, seen = -(-percent * sum(n for _, n in lengths) // 100), 0
    for length, n in lengths:
        seen += n
        if seen >= wanted:
            return length
    return 0


def _spread(n: int, wanted: int) -> list[int]:
    """`wanted` of the numbers below n, evenly over them."""
    return sorted({(2 * i + 1) * n // (2 * wanted) for i in range(wanted)}) if n else []


def _pair(store: TokenStore, i: int, vocab: Vocab) -> Json:
    shown: Json = {"number": i + 1}
    for name, side in zip(SIDES, (store.src, store.tgt), strict=True):
        ids = side.ids[side.offsets[i] : side.offsets[i + 1]].tolist()
        shown[name] = {"text": vocab.decode([ids])[0], "pieces": vocab.pieces(ids)}
    return shown


# ---- for the terminal -------------------------------------------------------------------------------------------


def visible(text: str) -> str:
    """Controls, direction marks and everything else without a shape of its own as <U+202E>."""
    return "".join(c if c.isprintable() else f"<U+{ord(c):04X}>" for c in text)


def cut(text: str, width: int) -> str:
    """`text`, visible, in at most `width` columns of a terminal, of which a wide character takes two."""
    shown, columns, last = visible(text), 0, 0
    for i, character in enumerate(shown):
        last = i if columns < width else last
        columns += 1 + (unicodedata.east_asian_width(character) in "WF")
        if columns > width:
            return shown[:last] + "\u2026"
    return shown


def described(report: Json, width: int) -> str:
    """The report as text of at most `width` columns; only the ledger's table may be wider."""
    languages = [report["ledger"]["settings"]["data"][side] for side in SIDES]
    blocks = [
        [ledger_table(report["ledger"])],
        *_dropped(report["ledger"]["corpora"], languages, width),
        _figures(report["splits"], languages),
        _histogram(report["splits"]["train"], languages, width),
    ]
    for pair in report["pairs"]:
        blocks.append([f"pair {pair['number']:,}"])
        for side, language in zip(SIDES, languages, strict=True):
            blocks[-1] += [
                cut(f"  {language}  {pair[side]['text']}", width),
                cut(" " * (len(language) + 4) + " ".join(pair[side]["pieces"]), width),
            ]
    return "\n\n".join("\n".join(block) for block in blocks)


def _dropped(corpora: list[Json], languages: list[str], width: int) -> Iterator[list[str]]:
    for corpus in corpora:
        for rule, samples in corpus.get("samples", {}).items():  # older stores have none
            lines = [
                f"{corpus['corpus']}: {corpus['dropped'][rule]:,} dropped, {rule}; for example"
            ]
            for pair in samples:
                if rule == "unreadable":
                    lines.append(f"  {pair[0]}")  # the complaint
                else:
                    lines += [
                        f"  {language}  {text}"
                        for language, text in zip(languages, pair, strict=True)
                    ]
            yield [cut(line, width) for line in lines]


def _figures(splits: Json, languages: list[str]) -> list[str]:
    rows: list[tuple[str, ...]] = [
        (
            "",
            "sentences",
            "pieces",
            "mean",
            "median",
            "90 %",
            "99 %",
            "longest",
            "pieces/word",
            "<unk>",
        )
    ]
    for split, sides in splits.items():
        for side, language in zip(SIDES, languages, strict=True):
            of = sides[side]
            rows.append(
                (
                    f"{split} {language}",
                    f"{of['sentences']:,}",
                    f"{of['pieces']:,}",
                    f"{of['mean']:.1f}",
                    *(f"{of[key]:,}" for key in ("median", "p90", "p99", "longest")),
                    f"{of['pieces_per_word']:.3f}",
                    f"{of['unk_share']:.4%}",
                )
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]


def binned(sides: Json) -> tuple[list[str], list[list[float]]]:
    """Names of the bins, and for each side the share of its sentences in each; the last bin holds all longer ones."""
    longest = max(sides[side]["p99"] for side in SIDES)
    step = next(
        unit * 10**power
        for power in range(9)
        for unit in (1, 2, 5)
        if unit * 10**power * BINS > longest
    )
    n_bins = longest // step + 1
    counts = np.zeros((2, n_bins + 1), np.int64)
    for row, side in zip(counts, SIDES, strict=True):
        for length, n in sides[side]["lengths"]:
            row[min(length // step, n_bins)] += n
    names = [
        f"{i * step}" if step == 1 else f"{i * step}-{(i + 1) * step - 1}" for i in range(n_bins)
    ]
    return [*names, f"{n_bins * step}-"], (
        counts / np.maximum(counts.sum(1, keepdims=True), 1)
    ).tolist()


def _histogram(sides: Json, languages: list[str], width: int) -> list[str]:
    names, shares = binned(sides)
    left = max(6, *map(len, names))
    room = max((width - left) // 2 - 11, 4)
    per_share = room / max(map(max, shares))
    lines = [
        "pieces".rjust(left)
        + "".join(f"  {'share':>7} {language:<{room}}" for language in languages)
    ]
    for name, *both in zip(names, *shares, strict=True):
        bars = ("\u2588" * (round(share * per_share) or (share > 0)) for share in both)
        lines.append(
            name.rjust(left)
            + "".join(
                f"  {share:7.2%} {bar:<{room}}" for share, bar in zip(both, bars, strict=True)
            )
        )
    return [line.rstrip() for line in lines]


# ---- as a picture -----------------------------------------------------------------------------------------------


def check_plot(path: Path) -> None:
    """Tell the user before the work what will keep `plot` from writing `path`."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot: matplotlib is not installed; pip install 'nmt[plot]'")
    if path.suffix != ".png":
        raise UserError(
            f"--plot: {path} is not a .png file; name it {path.with_suffix('.png').name}"
        )
    check_writable(path)


def plot(report: Json, path: Path) -> None:
    """Both histograms and the pieces per word as a PNG file."""
    from matplotlib.figure import Figure

    sides, data = report["splits"]["train"], report["ledger"]["settings"]["data"]
    names, shares = binned(sides)
    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.subplots(1, 3, width_ratios=(4, 4, 1))
    axes[1].sharey(axes[0])
    for axis, side, row in zip(axes, SIDES, shares, strict=False):
        axis.bar(names, [100 * share for share in row], width=1, edgecolor="white")
        axis.set(title=data[side], xlabel="pieces per sentence", ylabel="% of sentences")
        axis.tick_params("x", rotation=90)
    axes[2].bar([data[side] for side in SIDES], [sides[side]["pieces_per_word"] for side in SIDES])
    axes[2].set(ylabel="pieces per word")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    write_bytes(path, picture.getvalue())
