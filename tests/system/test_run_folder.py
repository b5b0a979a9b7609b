"""The names on disk, which other people's scripts rely on."""

from pathlib import Path

from nmt.system.run_folder import RUN_FILES, RunFolder, dev_text_file, ids_file, offsets_file


def test_layout_of_a_run_folder() -> None:
    run = RunFolder(Path("run"))
    places = {
        run.checkpoint(24): "checkpoints/step-0000024",
        run.average: "average",
        run.config: "config.yaml",
        **dict(zip(run.vocabs, ("vocab.model", "vocab.src.model", "vocab.tgt.model"), strict=True)),
        run.metrics: "metrics.jsonl",
        run.status: "status.json",
        run.report: "report.html",
        run.results: "results.json",
        run.translations: "translations.json",
        run.curve: "averaging.json",
        run.sweep: "sweep.json",
        run.nonfinite(7): "nonfinite-0000007.json",
    }
    assert {path: str(path.relative_to("run")) for path in places} == places
    assert set(RUN_FILES) < set(places.values())


def test_files_of_a_store() -> None:
    names = [ids_file("train", "src"), offsets_file("valid", "tgt"), dev_text_file("src")]
    assert names == ["train.src.ids.npy", "valid.tgt.offsets.npy", "valid.src.txt"]
