"""A grid becomes runs, and every mistake in it is found before one of them starts."""

from pathlib import Path

from pytest import mark, raises

from nmt.config_files import find_shipped_configs, format_config
from nmt.extras.sweep.grid import Sweep, read_grid
from nmt.system.errors import UserError

HEAD = "base: demo.yaml\n"
TWO = "runs:\n  base: {}\n  N = 2: {model.n_layers: 2}\n"


def read(folder: Path, text: str, *overrides: str) -> Sweep:
    (folder / "grid.yaml").write_text(text)
    return read_grid(str(folder / "grid.yaml"), folder / "out", overrides)


def test_runs_are_settings_times_seeds(tmp_path: Path) -> None:
    sweep = read(tmp_path, f"{HEAD}seeds: [1, 7]\nsettings: {{training.steps: 9}}\n{TWO}")
    assert [run.label for run in sweep.runs] == [
        "base-seed1",
        "base-seed7",
        "N-2-seed1",
        "N-2-seed7",
    ]
    assert [run.config.model.n_layers for run in sweep.runs] == [3, 3, 2, 2]
    assert [run.config.seed for run in sweep.runs] == [1, 7, 1, 7]
    assert {run.config.training.steps for run in sweep.runs} == {9}
    assert {run.config.out for run in sweep.runs} == {
        str(tmp_path / "out" / run.label) for run in sweep.runs
    }


def test_a_grid_combines_values_and_names_them(tmp_path: Path) -> None:
    text = f"{HEAD}grid: {{training.label_smoothing: [0, 0.1], model.tied: [true, decoder]}}\n"
    sweep = read(tmp_path, text)
    assert [run.name for run in sweep.runs] == [
        "label_smoothing 0, tied true",
        "label_smoothing 0, tied decoder",
        "label_smoothing 0.1, tied true",
        "label_smoothing 0.1, tied decoder",
    ]
    assert sweep.runs[3].config.training.label_smoothing == 0.1
    assert sweep.runs[3].config.model.tied == "decoder"


def test_runs_of_the_same_data_share_a_store(tmp_path: Path) -> None:
    text = (
        f"{HEAD}runs:\n  a: {{}}\n  b: {{vocab.bpe_dropout: 0.1}}\n  c: {{vocab.size: 900}}\n"
        "  d: {data.root: elsewhere}\n"
    )
    a, b, c, d = [run.config.data.store for run in read(tmp_path, text).runs]
    assert a == b
    assert len({a, c, d}) == 3
    for override in ("data.store=there", "data={store: there}"):
        given = read(tmp_path, HEAD + TWO, override)
        assert {run.config.data.store for run in given.runs} == {"there"}
    given = read(tmp_path, f"{HEAD}settings: {{data: {{store: here}}}}\n{TWO}")
    assert {run.config.data.store for run in given.runs} == {"here"}


def test_a_base_is_found_beside_the_grid(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: demo.yaml\nseed: 5\n")
    (run,) = read(tmp_path, "base: mine.yaml\nruns: {only: {}}\n").runs
    assert run.label == "only-seed5"


@mark.parametrize(
    "text, overrides, complaint",
    [
        (f"{HEAD}bass: 1\n{TWO}", (), "grid.yaml:2: bass: unknown key; did you mean base?"),
        (TWO, (), "base: is missing"),
        (HEAD, (), "needs either runs or grid"),
        (f"{HEAD}grid: {{seed: [1]}}\n", (), "grid.yaml:2: grid.seed[0]: the grid's key seeds"),
        (f"{HEAD}runs: {{}}\n", (), "needs either runs or grid"),
        (f"{HEAD}grid: {{model.dropout: []}}\n", (), "one value of each setting"),
        (f"{HEAD}seeds: []\n{TWO}", (), "has no runs; give at least one seed"),
        (f"{HEAD}seeds: [1, 1]\n{TWO}", (), "base-seed1; give each a name and a seed of its own"),
        (f"{HEAD}seeds: [-1]\n{TWO}", (), "grid.yaml:2: seed is -1; it must"),
        (f"{HEAD}score: [train]\n{TWO}", (), "grid.yaml:2: score[0]: 'train' is not one of"),
        (
            f"{HEAD}{TWO}  third: {{model.n_layer: 2}}\n",
            (),
            "run 'third': {grid}:5: model.n_layer: unknown key; did you mean n_layers?",
        ),
        (
            f"{HEAD}{TWO}  third: {{model.dropout: 1.5}}\n",
            (),
            "run 'third': {grid}:5: model.dropout is 1.5; it must be in [0, 1)",
        ),
        (
            f"{HEAD}{TWO}  third: {{model.n_heads: 3}}\n",
            (),
            "demo.yaml:17: model: d_model 128 is not divisible",
        ),
        (f"{HEAD}{TWO}  N @ 2: {{}}\n", (), "runs 'N = 2' and 'N @ 2' would share the folder"),
        (f"{HEAD}{TWO}  x: {{out: y}}\n", (), "grid.yaml:5: runs.x.out: the folder of a run"),
        (f"{HEAD}average: 0\n{TWO}", (), "grid.yaml:2: average is 0; it must be at least 1"),
        (f"{HEAD}average: 7\n{TWO}", (), "run 'base': average is 7, but training.keep_ch"),
        (f"{HEAD}score: [test]\n{TWO}", ("data.test=null",), "score has test, but data.test is"),
        (f"{HEAD}{TWO}", ("model.n_layers=4",), "model.n_layers=4: the runs of"),
        (
            f"{HEAD}runs: {{a: {{}}, b: {{model: {{n_layers: 2}}}}}}\n",
            ("model.n_layers=4",),
            "model.n_layers=4: the runs of",
        ),
        (f"{HEAD}{TWO}", ("model={n_layers: 4}",), "differ in model.n_layers; leave it out"),
        (f"{HEAD}{TWO}", ("seed=4",), "seed=4: the grid's key seeds"),
        (f"{HEAD}{TWO}", ("training={mirror: s3://b}",), "training.mirror: one place cannot"),
        (
            f"{HEAD}settings: {{training: {{mirror: s3://b}}}}\n{TWO}",
            (),
            "training.mirror: one place cannot",
        ),
        (TWO, (), "{grid}: base: is missing"),
        (
            f"{HEAD}seeds: [1, 2]\nruns: {{base: {{}}, same: {{}}}}\n",
            (),
            "{grid}: runs 'base' and 'same' have the same settings",
        ),
        (
            f"{HEAD}settings: {{model.encoder_layers: 2, model.decoder_layers: 2}}\n"
            "grid: {model.n_layers: [1, 2]}\n",
            (),
            "runs 'n_layers 1' and 'n_layers 2' have the same settings",
        ),
        (
            f"{HEAD}grid: {{decoding: [{{temperature: 1}}, {{temperature: 5}}]}}\n",
            (),
            "{grid}:2: decoding.temperature is 5, but it has no effect without decoding.sample=true",
        ),
    ],
)
def test_mistakes_are_refused(
    text: str, overrides: tuple[str, ...], complaint: str, tmp_path: Path
) -> None:
    with raises(UserError) as error:
        read(tmp_path, text, *overrides)
    assert complaint.replace("{grid}", str(tmp_path / "grid.yaml")) in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_grid_that_is_not_there_brings_up_the_shipped_ones(tmp_path: Path) -> None:
    with raises(UserError, match="smoothing.yaml: not found; .*label-smoothing.yaml"):
        read_grid("smoothing.yaml", tmp_path)


def test_a_run_that_exists_keeps_its_settings(tmp_path: Path) -> None:
    sweep = read(tmp_path, HEAD + TWO)
    run = sweep.runs[1]
    run.folder.path.mkdir(parents=True)
    run.folder.config.write_text(format_config(run.config))
    read(tmp_path, f"{HEAD}seeds: [1, 2]\n{TWO}  third: {{model.n_layers: 4}}\n", "data.root=moved")
    with raises(UserError, match=r"run 'N = 2': .*N-2-seed1: .*model.n_layers: 2 -> 1"):
        read(tmp_path, HEAD + TWO.replace("model.n_layers: 2", "model.n_layers: 1"))
    with raises(UserError, match=r"run 'N = 2': .*training.steps: 600 -> 900"):
        read(tmp_path, HEAD + TWO, "training.steps=900")


@mark.parametrize(
    "name", sorted(path.name for path in find_shipped_configs().glob("sweeps/*.yaml"))
)
def test_shipped_grids_can_be_read(name: str, tmp_path: Path) -> None:
    assert read_grid(name, tmp_path).runs
