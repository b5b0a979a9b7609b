"""What nmt-init does with its options: find the languages, name the corpora, open the model of --from, and
write the config. Mistakes in the options are reported before torch is imported.
"""

import os
import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nmt.agreement import check_corpus, find_direction
from nmt.config import RANDOM_SEED, CorpusConfig, DataConfig
from nmt.config_files import load_config
from nmt.extras.profile.formats import describe_formats
from nmt.languages import find_code
from nmt.system.errors import UserError
from nmt.system.files import make_folder, refuse_run_file
from nmt.system.progress import say
from nmt.system.records import find_unusable_character
from nmt.system.runtime import read_rank_variable, tune_process

if TYPE_CHECKING:
    from nmt.extras.init.recipe import Start


def write_first_config(args: Namespace) -> None:
    """Write the config that the options of nmt-init ask for."""
    if not RANDOM_SEED.holds(args.seed):
        raise UserError(f"--seed {args.seed}: must {RANDOM_SEED.words}")
    if args.hours is not None and not 1 / 60 <= args.hours <= 1_000:
        raise UserError(f"--hours {args.hours}: must be between a minute and 1000")
    if not args.file and not (args.src and args.tgt):
        raise UserError("give your text as --src FILE --tgt FILE, or as --file FILE")
    data = name_corpora(args, Path(args.output or "SRC-TGT.yaml").absolute().parent)
    config = args.output or f"{data.src}-{data.tgt}.yaml"
    out = Path(config).absolute()
    refuse_run_file(out)
    make_folder(out.parent)

    tune_process()  # before torch is imported
    from nmt.extras.init.suggest import suggest_config

    start = None if args.start is None else open_start(args.start, out, args.force)
    trained = None if start is None else find_direction(start.config.data)
    if trained not in (None, find_direction(data)):
        say(f"note: {args.start} was trained for {trained}, and learns {find_direction(data)} now")
    suggest_config(out, data, args.seed, args.force, start, args.hours)
    say(f"nmt-export can give it to {describe_formats(load_config(str(out)).model)}")
    say(f"next: nmt-train --config {config}; with --plan it estimates memory and time first")


def open_start(name: str, config: Path, is_forced: bool) -> "Start":
    """Open the model of --from. A published one is converted first, to a folder beside the config."""
    from nmt.api import convert_published
    from nmt.checkpoint.run_checkpoints import open_checkpoint
    from nmt.extras.init.recipe import Start

    path = convert_published(name, config.with_name(f"{config.stem}.start"), is_forced)
    return Start(os.path.abspath(path), open_checkpoint(path).config)


def choose_languages(args: Namespace) -> tuple[str, str]:
    if args.languages is None:
        names = [args.file] if args.file else [args.src, args.tgt]
        languages = guess_languages(names)
        if languages is None:
            raise UserError(
                f"{' and '.join(names)}: the names do not show the languages; give --languages "
                "SRC-TGT, such as --languages en-de"
            )
        return languages
    match = re.fullmatch(r"([A-Za-z_]+)-([A-Za-z_]+)", args.languages)
    if match is None or match[1] == match[2]:
        raise UserError(
            f"--languages {args.languages}: is not a pair of languages; write it as en-de"
        )
    src, tgt = find_code(match[1]), find_code(match[2])
    if src == tgt:  # two regions of one language
        return match[1], match[2]
    if match[0] != f"{src}-{tgt}":
        say(f"--languages {match[0]}: called {src}-{tgt} from now on")
    return src, tgt


def guess_languages(names: Sequence[str]) -> tuple[str, str] | None:
    """Find the languages in the name of one file, pairs.en-de.tsv, or where the names of two differ,
    train.en and train.de.
    """
    if len(names) == 1:
        match = re.search(r"(?<![A-Za-z])([a-z]{2})[-_]([a-z]{2})(?![A-Za-z])", Path(names[0]).name)
        return (match[1], match[2]) if match else None
    src_words, tgt_words = (re.split("[^A-Za-z]+", Path(name).name) for name in names)
    # from the end: the files may have other names before their languages
    for src, tgt in zip(reversed(src_words), reversed(tgt_words), strict=False):
        if src != tgt:
            has_languages = re.fullmatch("[a-z]{2} [a-z]{2}", f"{src} {tgt}")
            return (src, tgt) if has_languages else None
    return None


def name_corpora(args: Namespace, root: Path) -> DataConfig:
    """Return the corpora that the options name, with paths relative to `root`, and their languages."""

    def locate(path: str) -> str:
        if unusable := find_unusable_character(path):
            raise UserError(
                f"{path!r}: has {unusable} in its name, which a config cannot contain; rename it"
            )
        return os.path.abspath(path).removeprefix(os.path.join(root, ""))

    def make_corpus(prefix: str, archive: str | None = None) -> CorpusConfig | None:
        paths = [vars(args)[f"{prefix}{part}"] for part in ("src", "tgt", "file")]
        if not any(paths):
            return None
        if archive is None:  # otherwise these are members of it
            paths = [path and locate(path) for path in paths]
        src, tgt, file = paths
        corpus = CorpusConfig(src, tgt, archive and locate(archive), file)
        if problem := corpus.check():
            option = f"--{prefix}".replace("_", "-")
            raise UserError(f"{option}src, {option}tgt, {option}file: {problem}")
        return corpus

    train = make_corpus("", args.archive)
    assert train is not None  # of write_first_config and of nmt-train
    valid, test = make_corpus("valid_"), make_corpus("test_")
    src, tgt = choose_languages(args)
    data = DataConfig(src, tgt, root=str(root), train=(train,), valid=valid, test=test)
    check_corpus("--", train, data)
    check_corpus("--valid-", valid, data)
    check_corpus("--test-", test, data)
    return data


def find_config_for(args: Namespace) -> str:
    """Return the name of the config that nmt-init writes for --src and --tgt. One that it wrote earlier
    is kept, so that the same command continues the same run.
    """
    data = name_corpora(args, Path.cwd())
    config = f"{data.src}-{data.tgt}.yaml"
    if os.path.exists(config):
        if load_config(config).data.train != data.train:
            raise UserError(
                f"{config}: is for text other than {args.src} and {args.tgt}; give --config FILE, or write a "
                f"config with nmt-init and -o FILE"
            )
        say(f"using {config}, which was written earlier")
    elif read_rank_variable("WORLD_SIZE", 1) > 1:
        raise UserError(
            f"{config}: does not exist yet; write it with nmt-init --src {args.src} --tgt {args.tgt} first, "
            "so that all ranks read the same choices"
        )
    else:
        write_first_config(args)
    return config
