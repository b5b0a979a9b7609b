"""nmt-translate as a user meets it: odd text, long lines, figures beside the text, stops,
goings-on, other engines.
"""

import fcntl
import json
import os
import pty
import re
import select
import signal
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from pytest import MonkeyPatch, approx, fixture, mark, raises
from support.capture import Capture, read_errors, read_stderr
from support.in_process import Main, refuse, succeed
from support.needs import needs_package
from support.processor import CPU
from support.rings import amount
from support.text_lines import join_lines, read_json_lines, read_text_lines
from support.toy_corpus import sentences
from support.untrained import DECODING, make_checkpoint, make_vocab
from support.waiting import until
from support.warm_process import CONTEXT, finish, start_command

import nmt.system.progress
from nmt.checkpoint.run_checkpoints import open_checkpoint
from nmt.commands.eval import main as nmt_eval
from nmt.commands.translate import main as nmt_translate
from nmt.config import DecodingConfig
from nmt.data.batch import Packed, pack
from nmt.data.vocab import EOS, Vocab
from nmt.extras.maps.alignment import align
from nmt.system.files import read_json
from nmt.system.progress import say_once
from nmt.translate.formats import Layout
from nmt.translate.lines import FIRST_CHUNK
from nmt.translate.search import search
from nmt.translate.search_rules import SearchRules, make_rules
from nmt.translate.search_state import Hypothesis
from nmt.translate.translator import Translation, Translator, make_translator

LINES = [src for src, _ in sentences(40, seed=7)]  # more than the first chunk holds
TEXT = join_lines(LINES)
NEEDS_CT2 = needs_package("ctranslate2")
BOUNDS = ("decoding.max_source=40", "--long-lines")


@fixture(scope="module")
def place(module_path: Path, vocab: Vocab) -> Path:
    return make_checkpoint(module_path / "average", vocab)


@fixture(scope="module")
def translator(place: Path) -> Translator:
    return make_translator(open_checkpoint(place), CPU, DECODING)


@fixture(scope="module")
def texts(translator: Translator) -> list[str]:
    """What each of LINES becomes when it is searched alone."""
    return [translate_alone(translator, line) for line in LINES]


def search_alone(translator: Translator, line: str, n: int = 1) -> list[Hypothesis]:
    """The search of one sentence, without all that is tested here."""
    ids = translator.vocab.src.encode([line])[0]
    return (
        search(translator.model, pack([[*ids, EOS]]), make_rules(translator.config, n))[0]
        if ids
        else [Hypothesis([], 0.0)]
    )


def translate_alone(translator: Translator, line: str) -> str:
    return translator.vocab.tgt.decode([search_alone(translator, line)[0].ids])[0]


def run_translate(
    folder: Path, text: str | bytes, place: Path, *options: str, code: int = 0
) -> bytes:
    """What the command writes for such an input."""
    source, out = folder / "in", folder / "out"
    source.write_bytes(text if isinstance(text, bytes) else text.encode())
    out.unlink(missing_ok=True)
    assert nmt_translate([str(place), "-i", str(source), "-o", str(out), *options]) == code
    return out.read_bytes()


def evaluate(folder: Path, lines: list[str], place: Path, *options: str) -> Any:
    """What nmt-eval writes for lines that are their own reference."""
    text, reference, scores = (folder / name for name in ("text", "reference", "scores.json"))
    for file in (text, reference):
        file.write_text(join_lines(lines))
    words = [str(place), "--src", str(text), "--ref", str(reference), "--json", str(scores)]
    succeed(nmt_eval, *words, *options)
    return read_json(scores)


def start_translate(
    place: Path, stdin: int, stdout: int, errors: Path, *options: str
) -> BaseProcess:
    with errors.open("w") as stderr:
        streams = [stdin, stdout, stderr.fileno()]
        return start_command(["translate", str(place), *options], streams)


# ---- text ---------------------------------------------------------------------------------------------------------


ODD = {
    "line ends that are none": "\u2028a\u0085b\x0bc\x0c".encode(),
    "emoji": "\U0001f642\u200d\U0001f469".encode(),
    "right to left": "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627".encode(),
    "another script": "\u65e5\u672c\u8a9e ".encode() * 20,
    "only punctuation": b"!?!? ... --- ;;;",
    "NUL": b"x\x00y",
    "not UTF-8": b"red \xff\xfe dog",
    "half a letter": b"red d\xc3",
    "UTF-16": "red dog".encode("utf-16"),
    "many words": b"red " * amount(2_500, 25_000),
    "many letters without a space": b"x" * amount(10_000, 100_000),
    "spaces": b" " * 100_000,
}


@mark.parametrize("unit", ["sentence", "paragraph"])
def test_a_line_out_for_each_line_in(
    unit: str, place: Path, translator: Translator, tmp_path: Path
) -> None:
    data = b"".join(b"red dog\n" + odd + b"\n" for odd in ODD.values()) + b"blue cat"
    how = ["--text"] if unit == "paragraph" else ["--long-lines", "cut"]
    out = run_translate(tmp_path, data, place, BOUNDS[0], *how, "decoding.beam=2").decode()
    lines = out.split("\n")
    assert len(lines) == 2 * len(ODD) + 2
    assert set(lines[:-2:2]) == {translate_alone(translator, "red dog")}
    assert lines[-2:] == [translate_alone(translator, "blue cat"), ""]


def test_a_line_end_in_a_translation_becomes_a_space() -> None:
    one = Translation("a\tb\nc", -1.5, (5, 6), (1, 0))
    assert Layout().lines(1, "x", [one], None) == "a\tb c\n"  # type: ignore[arg-type]
    assert Layout(has_scores=True).lines(1, "x", [one], None) == "-1.500000\ta b c\n"  # type: ignore[arg-type]
    assert Layout(2).lines(4, "x", [one, one], None) == "3\t-1.500000\ta b c\n" * 2  # type: ignore[arg-type]


# ---- long lines ---------------------------------------------------------------------------------------------------


def test_long_lines_are_cut_with_a_warning(
    place: Path, translator: Translator, tmp_path: Path, capsys: Capture
) -> None:
    lines = ["red", ". ".join(LINES[:12])]
    text = join_lines(lines)
    ids = translator.vocab.src.encode(lines)[1]
    cut = run_translate(tmp_path, text, place, *BOUNDS, "cut").decode().splitlines()[1]
    best = search(translator.model, pack([[*ids[:40], EOS]]), make_rules(DECODING))[0][0]
    assert cut == translator.vocab.tgt.decode([best.ids])[0]
    assert f"warning: line 2 has {len(ids)} pieces and is cut to 40" in read_stderr(capsys)


def test_paragraphs_have_their_numbers_in_later_chunks(
    place: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Each has two sentences; those of the last chunk are in letters that the vocabulary lacks."""
    paragraphs = ["A red dog. Two cats!"] * FIRST_CHUNK + ["\u017b\u0179. \u017b\u0179."] * 3
    run_translate(tmp_path, join_lines(paragraphs), place, "--text")
    first, last = FIRST_CHUNK + 1, FIRST_CHUNK + 3
    assert f"warning: lines {first} to {last} are mostly <unk>" in read_stderr(capsys)


@mark.parametrize("workers, n_threads", [(1, 8), (3, 2), (9, 1)])
def test_workers_share_the_threads(
    workers: int, n_threads: int, place: Path, tmp_path: Path
) -> None:
    """This process is as each of them."""
    files = ("-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"))
    (tmp_path / "in").write_text("red dog\n")
    torch.set_num_threads(8)
    succeed(nmt_translate, place, *files, "--workers", workers)
    assert torch.get_num_threads() == n_threads


@mark.parametrize("workers", [1, 2])
def test_translations_that_reach_the_length_limit_are_counted_at_the_end(
    workers: int, place: Path, tmp_path: Path, capsys: Capture
) -> None:
    command = ("--json", "--workers", str(workers), "--n-best", "2")
    rows = run_translate(tmp_path, "\n\n" + TEXT, place, *command).splitlines()
    best = [json.loads(row)["candidates"][0] for row in rows]
    cut = [number for number, one in enumerate(best, 1) if one.get("is_cut")]
    assert 3 <= cut[0] and len(cut) < len(rows)
    *_, told = read_errors(capsys)
    assert told.startswith(
        f"warning: {tmp_path}/in:{cut[0]}: its translation has as many pieces as decoding.max_ratio "
        f"and decoding.max_extra allow, so its end may be missing; so have {len(cut)} of {len(rows)}; "
    )
    assert told.endswith("; for any other, raise decoding.max_extra")


def test_the_length_limit_is_named_for_the_lines_that_resume(
    place: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "in").write_text(TEXT)
    (tmp_path / "out").write_text("hund\n" * 30)
    files = ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    succeed(nmt_translate, place, *files, "--resume")
    assert " of 10; 3 of them repeat the same words" in read_stderr(capsys)


def test_a_line_of_text_is_a_paragraph(place: Path, tmp_path: Path, capsys: Capture) -> None:
    sentences = ["A red dog.", "Two cats!", "The house is old."]
    text = "{}  {}\n\n{}\n".format(*sentences)
    config = replace(DECODING, min_length=1)  # no sentence of running text comes out empty
    ours = make_translator(open_checkpoint(place), CPU, config)
    found = ours.find_candidates(sentences, 2)
    best = [candidates[0].text for candidates in found]
    paragraphs = "{}  {}\n\n{}\n".format(*best)
    assert run_translate(tmp_path, text, place, "--text").decode() == paragraphs
    (cut,) = read_errors(capsys)
    assert "in:1: its translation has as many pieces" in cut

    rows = run_translate(tmp_path, text, place, "--text", "--json", "--n-best", "2").splitlines()
    first, empty, last = map(json.loads, rows)
    assert first["source"] == " ".join(sentences[:2]).replace(" Two", "  Two")
    assert [row["text"] for row in (first, empty, last)] == paragraphs.splitlines()
    shown = [*first["sentences"], *empty["sentences"], *last["sentences"]]
    assert [one["source"] for one in shown] == sentences
    assert [one["sentence"] for one in shown] == [1, 2, 1]
    n_cut = [one["candidates"][0].get("is_cut") for one in shown].count(True)
    assert 0 < n_cut < 3 and f"so have {n_cut} of 3" in cut
    for one, candidates in zip(shown, found, strict=True):
        assert [row["text"] for row in one["candidates"]] == [each.text for each in candidates]


def test_lines_of_several_sentences_are_named_once(
    place: Path, tmp_path: Path, capsys: Capture
) -> None:
    lines = ["A red dog.", "Two cats! The house is old.", "Mr. Smith has 3.5 dogs.", "A b. C d. E."]
    run_translate(tmp_path, join_lines(lines * 50), place)
    warnings = [line for line in read_errors(capsys) if "sentences" in line]
    assert len(warnings) == 1
    assert ":2: has several sentences, and its translation has fewer; give --text" in warnings[0]
    run_translate(tmp_path, join_lines(lines[::2] * 50), place)
    assert "sentences" not in read_stderr(capsys)


@mark.parametrize("workers", ["1", "2"])
def test_a_refused_line_is_reported_after_the_lines_before_it(
    workers: str,
    place: Path,
    texts: list[str],
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: MonkeyPatch,
) -> None:
    """Several processes take lines from the second chunk on, and write what one process writes."""
    monkeypatch.setattr("nmt.system.pool.get_context", lambda _: CONTEXT)
    text = TEXT * 3 + "red dog " * 2_500 + "\nblue\n"
    options = (*BOUNDS, "refuse", "--workers", workers)
    assert run_translate(tmp_path, text, place, *options, code=2).decode().splitlines() == texts * 3
    errors = read_errors(capsys)
    assert len(errors) == 1
    expected = r"nmt-translate: error: line 121 has [\d,]+ pieces, more than 40; .*max_source"
    assert re.match(expected, errors[0])


# ---- scores, alignments --------------------------------------------------------------------------


def test_figures_beside_the_text(place: Path, translator: Translator, tmp_path: Path) -> None:
    """--json has all of them, and the other formats show some."""
    lines = [*LINES, "", 'w\u2028"x']
    text = join_lines(lines)
    options = ("--n-best", "2", "--json", "--alignments")
    rows = run_translate(tmp_path, text, place, *options).decode().split("\n")[:-1]
    objects = [json.loads(row) for row in rows]
    assert [(one["line"], one["source"]) for one in objects] == [*enumerate(lines, 1)]
    vocab = translator.vocab
    for line, found in zip(LINES, objects, strict=False):
        ids = vocab.src.encode([line])[0]
        assert found["source_pieces"] == vocab.src.pieces(ids)
        for shown, one in zip(found["candidates"], search_alone(translator, line, 2), strict=True):
            assert shown["text"] == vocab.tgt.decode([one.ids])[0]
            assert shown["pieces"] == vocab.tgt.pieces(one.ids)
            assert shown["score"] == approx(one.score, abs=1e-5)
            (links,) = align(translator.model, [ids], [one.ids])
            assert shown["alignment"] == [[s, t] for t, s in enumerate(links)]

    table = run_translate(tmp_path, text, place, "--n-best", "2").decode().split("\n")[:-1]
    numbered = [(n, one) for n, row in enumerate(objects) for one in row["candidates"]]
    assert table == [f"{n}\t{one['score']:.6f}\t{one['text']}" for n, one in numbered]

    out = run_translate(tmp_path, text, place, "--scores", "--alignments").decode().split("\n")[:-1]
    for shown, row in zip(out, objects, strict=True):
        best = row["candidates"][0]
        score, *words = shown.split("\t")
        assert float(score) == approx(best["score"], abs=1e-5)
        assert words == [best["text"], " ".join(f"{s}-{t}" for s, t in best["alignment"])]


def test_options_are_overrides_and_explicit_overrides_win(
    place: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    seen: list[SearchRules] = []

    def fake(model: object, src: Packed, rules: SearchRules, *_: object) -> list[list[Hypothesis]]:
        seen.append(rules)
        return [[Hypothesis([5], -1.0)] * rules.n_best for _ in range(src.n_sentences)]

    monkeypatch.setattr("nmt.translate.engine.search", fake)
    run_translate(
        tmp_path,
        "a\n",
        place,
        "--preset",
        "fairseq",
        "--sample",
        "--n-best",
        "9",
        "decoding.seed=7",
        "decoding.top_k=3",
        "decoding.length_penalty=0.5",
    )
    expected = DecodingConfig(
        **DecodingConfig.PRESETS["fairseq"], preset="fairseq", sample=True, seed=7, top_k=3
    )
    assert seen == [make_rules(replace(expected, length_penalty=0.5), 9)]
    run_translate(tmp_path, "a\n", place, "--beam", "3", "decoding.beam=6")
    assert seen[1] == make_rules(replace(DECODING, beam=6))


def test_lines_in_capitals_are_read_in_small_letters_but_scored_as_they_are(
    place: Path, translator: Translator, tmp_path: Path, capsys: Capture
) -> None:
    lines = ["red dog", "RED DOG LIKES THE HOUSE", "RED DOG"]
    text = join_lines(lines)
    small = [one.text for one in translator.translate(["red dog", "Red dog likes the house"])]
    as_it_is = [one.text for one in translator.translate(lines)]
    say_once.cache_clear()

    ours = run_translate(tmp_path, text, place).decode().splitlines()
    assert ours[:2] == [small[0], small[1].upper()] and ours[1] != as_it_is[1]
    told = [line for line in read_errors(capsys) if "small letters" in line]
    assert len(told) == 1 and "decoding.lower_capitals=false" in told[0]

    plain = run_translate(tmp_path, text, place, "decoding.lower_capitals=false").decode()
    out = tmp_path / "evaluated"
    evaluate(tmp_path, lines, place, "--output", str(out))
    assert plain.splitlines() == as_it_is == read_text_lines(out)
    assert "small letters" not in read_stderr(capsys)


def test_each_line_begins_with_its_prefix(place: Path, tmp_path: Path, capsys: Capture) -> None:
    begins = ["" if i % 3 else f"hund {line}" for i, line in enumerate(LINES)]
    file = tmp_path / "begins"
    file.write_text(join_lines(begins))
    rows = run_translate(tmp_path, TEXT, place, "--prefix", str(file)).decode().splitlines()
    for row, begin in zip(rows, begins, strict=True):
        assert row.startswith(begin)
    capsys.readouterr()
    for text, problem in (
        (TEXT + "more\n", f"ends after line {len(LINES)}"),
        (TEXT.partition("\n")[2], "has more lines than the input"),
    ):
        run_translate(tmp_path, text, place, "--prefix", str(file), code=2)
        assert f"{file}: {problem}" in read_stderr(capsys)


def test_models_translate_together_if_they_share_a_vocabulary(
    place: Path, tmp_path: Path, capsys: Capture
) -> None:
    once = run_translate(tmp_path, TEXT, place)
    capsys.readouterr()
    assert run_translate(tmp_path, TEXT, place, str(place)) == once
    assert "some of these have the same weights" in read_stderr(capsys)
    (tmp_path / "other").mkdir()
    other = make_checkpoint(tmp_path / "other" / "average", make_vocab(tmp_path / "other", 79))
    capsys.readouterr()
    assert nmt_translate([str(place), str(other), "-i", str(tmp_path / "in")]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and str(place) in captured.err and str(other) in captured.err
    assert len(captured.err.splitlines()) == 1


# ---- files, stops, processes --------------------------------------------------------------------------------------


def test_a_log_hears_once_a_minute_how_far_it_is(
    place: Path, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(nmt.system.progress, "clock", count(0, 30).__next__)
    (tmp_path / "in").write_text(TEXT)
    to_file = ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    succeed(nmt_translate, str(place), *to_file)
    assert read_errors(capsys)[0].startswith("translating: 40/40 lines")


def test_resuming_completes_the_output(place: Path, tmp_path: Path, capsys: Capture) -> None:
    whole = run_translate(tmp_path, TEXT, place)
    out = tmp_path / "out"
    command = [str(place), "-i", str(tmp_path / "in"), "-o", str(out)]
    for size in (0, 1, len(whole) // 3, len(whole) - 1, len(whole)):
        out.write_bytes(whole[:size])
        succeed(nmt_translate, *command, "--resume")
        assert out.read_bytes() == whole
    out.write_bytes(b"something else\n")
    assert nmt_translate(command) == 0 and out.read_bytes() == whole  # it begins again
    assert (
        "is also input or output" in refuse(capsys, nmt_translate, place, "-i", out, "-o", out)
        and out.read_bytes() == whole
    )


def test_resuming_with_something_else_is_refused(
    place: Path, tmp_path: Path, capsys: Capture
) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    command = [str(place), "-i", str(source), "-o", str(out), "--long-lines", "refuse"]

    def translate(text: str, *more: str) -> int:
        source.write_text(text)
        return nmt_translate([*command, *more])

    assert translate("red\nblue\n" + "dog " * 2_000) == 2
    for text, beam in (("red\nblue\ndog\n", "1"), ("blue\nblue\ndog\n", "4")):
        assert translate(text, "--resume", "--beam", beam) == 2
        assert "from other lines, by another model or with other settings" in read_stderr(capsys)
    # the line that was refused is mended
    assert translate("red\nblue\ndog\n", "--resume", "decoding.batch_tokens=99") == 0
    assert out.read_bytes() == run_translate(tmp_path, source.read_bytes(), place)
    assert not (tmp_path / "out.nmt-resume").exists()


def test_a_mistake_in_the_prefixes_leaves_the_output_as_it_was(
    place: Path, tmp_path: Path, capsys: Capture
) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_text("red dog\n")
    out.write_text("hund\n")
    command = [str(place), "-i", str(source), "-o", str(out), "--prefix"]
    for prefix, message in (
        ("nowhere", "nowhere: cannot be read"),
        (str(out), "is also input or output"),
    ):
        assert (
            message in refuse(capsys, nmt_translate, *command, prefix)
            and out.read_text() == "hund\n"
        )


def test_a_device_can_be_written_but_not_resumed(
    place: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "in").write_text("red dog\n")
    command = [str(place), "-i", str(tmp_path / "in"), "-o", "/dev/null"]
    with open("/dev/null", "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)  # as another command that writes there
        assert nmt_translate(command) == 0
    assert "/dev/null" not in read_stderr(capsys)
    assert nmt_translate([*command, "--resume"]) == 2
    message = read_stderr(capsys)
    assert "/dev/null: is not a regular file" in message and len(message.splitlines()) == 1


def test_an_output_longer_than_the_input_cannot_be_resumed(
    place: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "in").write_text(TEXT)
    (tmp_path / "out").write_text("hund\n" * 41)
    command = [str(place), "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--resume"]
    line = refuse(capsys, nmt_translate, *command)
    assert "in: has 40 lines, fewer than the 41 already done" in line
    (tmp_path / "out").write_text("hund\n" * 40)
    assert nmt_translate(command) == 0 and (tmp_path / "out").read_text() == "hund\n" * 40


def test_a_full_disk_is_a_failure_that_names_the_output(place: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("red dog\n")
    errors = tmp_path / "errors"
    with open("/dev/full", "w") as full, open(tmp_path / "in") as source:
        process = start_translate(place, source.fileno(), full.fileno(), errors)
    assert finish(process) == 1
    (told,) = read_text_lines(errors)
    assert "failed: <stdout>: cannot be written (No space left" in told


@mark.parametrize("closed, options", [("stdin", []), ("stdout", ["-i", __file__])])
def test_a_closed_stream_is_an_error(
    closed: str,
    options: list[str],
    place: Path,
    monkeypatch: MonkeyPatch,
    capsys: Capture,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, closed, None)  # as Python finds it after `<&-` or `>&-`
        assert nmt_translate([str(place), *options]) == 2
    assert "is closed; give -i FILE and -o FILE" in read_stderr(capsys)


STOPS = [(signal.SIGINT, 130), (signal.SIGKILL, -9), (signal.SIGTERM, -15)]


@mark.parametrize("number, code", amount(STOPS[:2], STOPS))
def test_a_stop_leaves_whole_lines(
    number: signal.Signals, code: int, place: Path, texts: list[str], tmp_path: Path
) -> None:
    out, errors = tmp_path / "out", tmp_path / "errors"
    source, sink = os.pipe()
    process = start_translate(place, source, 1, errors, "-o", str(out))
    os.close(source)
    os.write(sink, TEXT.encode() * 2)
    until(lambda: out.exists() and out.stat().st_size > 0)
    os.write(sink, TEXT.encode() * 10)
    time.sleep(0.1)
    assert finish(process, number) == code
    os.close(sink)
    told = "nmt-translate: interrupted\n" if number is signal.SIGINT else ""
    assert errors.read_text() == told
    lines = out.read_text().split("\n")
    assert lines.pop() == "" and lines == (texts * 12)[: len(lines)] and lines
    (tmp_path / "in").write_text(TEXT * 12)
    command = [str(place), "-i", str(tmp_path / "in"), "-o", str(out), "--resume"]
    assert nmt_translate(command) == 0
    assert read_text_lines(out) == texts * 12


def test_output_comes_before_the_input_ends_and_a_reader_may_leave(
    place: Path, translator: Translator
) -> None:
    """As a shell starts it, from the first line of the interpreter to its last."""
    command = [sys.executable, "-m", "nmt.commands.translate", str(place)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None and process.stderr is not None
        process.stdin.write(b"red dog\n")
        process.stdin.flush()
        expected = translate_alone(translator, "red dog") + "\n"
        assert process.stdout.readline().decode() == expected
        process.stdout.close()
        process.stdin.write(b"blue cat\n")
        process.stdin.flush()
        assert process.wait() == 0
        assert process.stderr.read() == b""


# ---- at a terminal ------------------------------------------------------------------------------------------------


def test_a_conversation(place: Path, translator: Translator, tmp_path: Path) -> None:
    main, side = pty.openpty()
    environment = {"XDG_STATE_HOME": str(tmp_path), "TERM": "dumb"}
    process = start_command(["translate", str(place)], [side] * 3, environment=environment)
    os.close(side)
    seen = b""

    def is_seen(text: str, seconds: float) -> bool:
        nonlocal seen
        while text.encode() not in seen:
            if not select.select([main], [], [], seconds)[0]:
                return False
            seen += os.read(main, 4096)
        seen = seen.partition(text.encode())[2]
        return True

    def wait_for(text: str) -> None:
        assert is_seen(text, 100), seen

    wait_for("> ")
    os.write(main, b"red dog\n")
    wait_for(translate_alone(translator, "red dog") + "\r\n")
    wait_for("> ")
    os.write(main, b"never sent")
    wait_for("never sent")
    # One that comes while readline is still setting up is lost to it, as Python is built
    is_prompted = False
    for _ in range(10):
        os.write(main, b"\x03")  # Ctrl-C
        is_prompted = is_seen("> ", 5)
        if is_prompted:
            break
    assert is_prompted, seen
    os.write(main, b"blue cat\n")
    wait_for(translate_alone(translator, "blue cat") + "\r\n")
    wait_for("> ")
    os.write(main, b":quit\n")  # a word, but not of the text
    wait_for("no commands; Ctrl-C drops a line, Ctrl-D ends\r\n")
    wait_for("> ")
    os.write(main, b"\x04")  # Ctrl-D
    assert finish(process) == 0
    os.close(main)
    history = tmp_path / "nmt" / "translate_history"
    assert history.read_text().split("\n") == ["red dog", "blue cat", ":quit", ""]
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


def test_attention_beside_the_output(
    place: Path, translator: Translator, tmp_path: Path, capsys: Capture
) -> None:
    """The translations are the same, and the map is of the best one, by the first of several models."""
    text, output, attention = (tmp_path / name for name in ("text", "output", "a.json"))
    text.write_text(TEXT)
    command = [str(place), str(place), "-i", str(text), "-o", str(output), "--n-best", "2"]
    assert nmt_translate(command) == 0
    alone = output.read_text()
    succeed(nmt_translate, *command, "--attention", attention)
    assert "the attention of the first model" in read_stderr(capsys)
    assert output.read_text() == alone
    rows = read_json_lines(attention)
    assert [row["line"] for row in rows] == list(range(1, len(LINES) + 1))
    for line, row, best in zip(LINES, rows, translator.translate(LINES), strict=True):
        vocab = translator.vocab
        assert row["source"] == [*vocab.src.pieces(vocab.src.encode([line])[0]), "</s>"]
        assert row["target"] == [*vocab.tgt.pieces(best.piece_ids), "</s>"]


# ---- other engines ------------------------------------------------------------------------------------------------


@fixture(scope="module")
def exported(place: Path) -> Path:
    from nmt.extras.export.export import export

    export(open_checkpoint(place), "ctranslate2", place.with_name("ct2"), "float32", LINES[:8])
    return place.with_name("ct2")


@NEEDS_CT2
def test_an_export_without_its_engine_is_called_an_export(exported: Path, capsys: Capture) -> None:
    assert nmt_translate([str(exported)]) == 2
    message = read_stderr(capsys)
    assert f"{exported}: is an export, not a checkpoint; add --engine ctranslate2" in message


@NEEDS_CT2
def test_ctranslate2_writes_the_same_lines_and_its_name(
    place: Path,
    exported: Path,
    translator: Translator,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    import ctranslate2

    lengths = [len(ids) for ids in translator.vocab.src.encode(LINES)]
    # Of one length, because there the longest sentence sets the limit for all
    usual = max(lengths, key=lengths.count)
    lines = [line for line, length in zip(LINES, lengths, strict=True) if length == usual]
    text, engine = "\n\n".join([*lines, ""]), ["--engine", "ctranslate2"]
    ours = run_translate(tmp_path, text, place, "--beam", "1")
    capsys.readouterr()
    assert run_translate(tmp_path, text, exported, *engine, "--beam", "1") == ours
    assert len(set(ours.split(b"\n"))) > 2
    label = f"ctranslate2 {ctranslate2.__version__}, float32"
    assert label in read_stderr(capsys)
    rows = run_translate(tmp_path, text, exported, *engine, "--json").splitlines()
    assert {json.loads(row)["engine"] for row in rows} == {label}
    expected = evaluate(tmp_path, lines, place, "decoding.beam=1")
    found = evaluate(tmp_path, lines, exported, *engine, "decoding.beam=1")
    assert (expected["engine"], found["engine"]) == ("nmt", label)
    assert found["scores"] == expected["scores"] and label in capsys.readouterr().out


@NEEDS_CT2
@mark.parametrize("command", [nmt_translate, nmt_eval])
def test_a_checkpoint_is_not_taken_for_an_export_nor_an_export_for_a_checkpoint(
    command: Main,
    place: Path,
    exported: Path,
    capsys: Capture,
) -> None:
    for folder, some in ((place, ["--engine", "ctranslate2"]), (exported, [])):
        assert command([str(folder), *some]) == 2
        captured = capsys.readouterr()
        (line,) = captured.err.splitlines()
        assert str(folder) in line and captured.out == ""


def test_a_source_in_pieces_is_translated_with_a_warning(
    place: Path, tmp_path: Path, capsys: Capture
) -> None:
    source = tmp_path / "in"
    source.write_text("red do@@ g\nblue\n" * 3)
    succeed(nmt_translate, place, "-i", source)
    assert f"warning: {source}:1: BPE was left in: 'red do@@ g', in 3 of 6" in read_stderr(capsys)
    source.write_text(TEXT)
    succeed(nmt_translate, place, "-i", source)
    assert "left in" not in read_stderr(capsys)


# ---- mistakes -----------------------------------------------------------------------------------------------------


@mark.parametrize(
    "options, message",
    [
        ("--resume", "--resume needs -o"),
        ("--resume -o x --n-best 2", "--json"),
        ("--n-best 0", "--n-best: 0"),
        ("--beam x", "--beam: 'x' is not a whole number"),
        ("training.steps=5", "training.steps=5: was fixed by training"),
        ("--preset moses", "moses"),
        ("--interactive -i x", "-i"),
        ("--interactive --workers 2", "--workers"),
        ("--interactive --on ray", "--on"),
        ("--text --scores", "as JSON only; give --json too"),
        ("--text --long-lines refuse", "--text does not support --long-lines"),
        ("--attention x.svg", "name it .html or .json"),
        ("--attention x.json --workers 2", "--workers"),
        ("--attention x.json --interactive -i x", "--attention does not support --interactive"),
        ("--attention x.json -o ./x.json", "is also -o"),
        ("--workers 4097", "--workers: 4,097 is more than 4,096"),
        ("--attention x.json -o x --resume", "--resume"),
        ("--attention x.json --engine ctranslate2", "--attention"),
        ("--engine ctranslate2 --n-best 2", "ctranslate2 does not support --n-best"),
        ("other --engine ctranslate2", "ctranslate2 does not support several checkpoints"),
    ],
)
def test_options_that_do_not_go_together(
    options: str, message: str, place: Path, capsys: Capture
) -> None:
    with raises(SystemExit, match="2"):
        nmt_translate([str(place), *options.split(" ")])
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("nmt-translate: error:") and message in line and captured.out == ""


def test_attention_does_not_replace_what_is_read(
    place: Path, tmp_path: Path, capsys: Capture
) -> None:
    text = tmp_path / "text.html"
    text.write_text(TEXT)
    words = [str(place), "-i", str(text), "-o", str(tmp_path / "out"), "--attention", str(text)]
    assert "is also input or output" in refuse(capsys, nmt_translate, *words)
    assert text.read_text() == TEXT


@mark.parametrize(
    "options, message",
    [
        ("--n-best 5", "decoding.beam is 2; give --beam 5"),
        ("-i nowhere", "nowhere: cannot be read"),
        ("-i .", ".: cannot be read"),
        ("-o nowhere/x", "nowhere/x: cannot be"),
        ("-o .", ".: cannot be written"),
        ("-o {place}/config.yaml", "is named like a config"),
        ("-o {place}/new", "belongs to a run"),
        ("decoding.baem=3", "did you mean beam"),
        ("--beam 2 x", "x: not found"),
        ("--prefix nowhere", "nowhere: cannot be read"),
        ("--attention nowhere/x.html", "nowhere/x.html: its folder does not exist"),
        ("--attention {place}/x.html", "belongs to a run"),
    ],
)
def test_mistakes_are_reported_in_one_line(
    options: str, message: str, place: Path, capsys: Capture
) -> None:
    kept = {path.name: path.read_bytes() for path in place.iterdir()}
    words = options.format(place=place).split()
    source = [] if "-i" in words else ["-i", __file__]
    assert nmt_translate([str(place), *words, *source]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert message in line and captured.out == ""
    assert {path.name: path.read_bytes() for path in place.iterdir()} == kept


def test_pipes_that_are_set_not_to_wait(place: Path, texts: list[str], tmp_path: Path) -> None:
    """As ssh and Node.js set them, for all that share the pipe."""
    source, ours = os.pipe()
    theirs, sink = os.pipe()
    for end in (source, sink):
        os.set_blocking(end, False)
    process = start_translate(place, source, sink, tmp_path / "errors")
    os.close(source)
    os.close(sink)
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
    n = 10_000 // len("".join(texts)) + 1  # more than this pipe holds

    def feed() -> None:
        with open(ours, "w") as file:
            time.sleep(1)  # it waits for the first line
            file.write(TEXT * n)

    thread = threading.Thread(target=feed)
    thread.start()
    time.sleep(3)
    with open(theirs) as file:
        assert file.read().splitlines() == texts * n
    thread.join()
    assert finish(process) == 0


def test_standard_output_must_not_be_the_input(place: Path, tmp_path: Path, capfd: Capture) -> None:
    """`nmt-translate -i text >> text` would read what it writes."""
    text = tmp_path / "text"
    text.write_text(TEXT)
    output = os.dup(1)
    with text.open("ab") as appended:
        os.dup2(appended.fileno(), 1)
    try:
        code = nmt_translate([str(place), "-i", str(text)])
    finally:
        os.dup2(output, 1)
        os.close(output)
    assert code == 2 and text.read_text() == TEXT
    assert "standard output: is also input or output" in read_stderr(capfd)
