"""Folders at a URL count once they are complete, and what is fetched is what was copied."""

from pathlib import Path
from uuid import uuid4

import pytest

from nmt.system.errors import UserError
from nmt.system.files import seal, verify
from nmt.system.remote import Remote, RemoteError


@pytest.fixture(params=["file", "memory"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Remote:
    place = {"file": tmp_path / "far", "memory": f"/{uuid4()}"}[request.param]
    return Remote(f"{request.param}://{place}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "near"
    path.mkdir()
    (path / "weights").write_bytes(bytes(range(256)) * 1000)
    (path / "state.json").write_text("{}")
    seal(path)
    return path


def test_a_folder_is_complete_with_its_manifest(
    remote: Remote, folder: Path, tmp_path: Path
) -> None:
    assert remote.list_sealed("all") == set()
    manifest = remote.put_files(folder, "all/one")
    assert remote.list_sealed("all") == set()
    remote.write("all/one/manifest.json", manifest)
    assert remote.list_sealed("all") == {"one"}
    remote.get_folder("all/one", tmp_path / "back")
    verify(tmp_path / "back")
    for file in folder.iterdir():
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes()
    # until a changed one is complete, there is none
    remote.put_files(folder, "all/one")
    assert remote.list_sealed("all") == set()


def test_a_damaged_folder_is_not_fetched(remote: Remote, folder: Path, tmp_path: Path) -> None:
    remote.write("one/manifest.json", remote.put_files(folder, "one"))
    remote.write("one/weights", bytes(256_000))
    with pytest.raises(UserError, match=r"one: .*weights: is damaged"):
        remote.get_folder("one", tmp_path / "back")
    assert not (tmp_path / "back").exists()
    remote.unseal("one")
    assert remote.list_sealed("") == set()


def test_what_is_absent(remote: Remote, folder: Path, tmp_path: Path) -> None:
    assert remote.read("nothing") is None
    assert not remote.get_file("nothing", tmp_path / "x")
    remote.remove_folder("nothing")
    remote.write("all/one/manifest.json", remote.put_files(folder, "all/one"))
    remote.remove_folder("all/one")
    assert remote.list_sealed("all") == set() and remote.read("all/one/state.json") is None


def test_errors_of_a_service_are_one_kind(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RemoteError, match="file"):
        Remote(f"file://{tmp_path}/file/inside").write("x", b"")
    with pytest.raises(UserError, match=r"training\.mirror=nope://x: .*nope"):
        Remote("nope://x")
