"""A finished run in which each test may break what it likes: the next one finds it whole again."""

import shutil

import pytest

from nmt.commands.average import main as nmt_average
from nmt.commands.eval import main as nmt_eval
from nmt.commands.train import main as nmt_train
from support.soaking import Ground, make_ground


def score_average(ground: Ground) -> int:
    text = str(ground.folder / "valid.en"), str(ground.folder / "valid.de")
    average = str(ground.folder / "run" / "average")
    return nmt_eval([average, "--src", text[0], "--ref", text[1], "decoding.beam=1"])


@pytest.fixture(scope="module", name="whole")
def finished_run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Ground:
    """A run by the SETTINGS of the test's module, with two checkpoints, an average and results, and
    its store.
    """
    ground = make_ground(tmp_path_factory.mktemp("whole"))
    assert nmt_train(ground.argv("run", *request.module.SETTINGS)) == 0
    assert nmt_average([f"{ground.folder}/run", "--last", "2"]) == score_average(ground) == 0
    shutil.copytree(ground.folder, f"{ground.folder}.whole", symlinks=True)
    return ground


@pytest.fixture(name="ground")
def intact_run(whole: Ground) -> Ground:
    shutil.rmtree(whole.folder)
    shutil.copytree(f"{whole.folder}.whole", whole.folder, symlinks=True)
    return whole
