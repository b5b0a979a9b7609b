"""Folders at a URL count once they are complete, and what is fetched is what was copied."""

import shutil
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from nmt.system.errors import UserError
from nmt.system.files import seal, verify
from nmt.system.remote import Remote, RemoteError


@pytest.fixture(params=["file", "memory"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Remote:
    place = {"file": tmp_path / "a[1]", "memory": f"/{uuid4()}"}[request.param]
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
    remote: Remote, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert remote.list_sealed("all") == set()
    remote.put_folder(folder, "all/one")
    assert remote.list_sealed("all") == {"one"}
    remote.get_folder("all/one", tmp_path / "back")
    verify(tmp_path / "back")
    for file in folder.iterdir():
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes()

    # one that is there is not copied again; until a changed one is complete, there is none
    monkeypatch.setattr(Remote, "put_file", refuse)
    remote.put_folder(folder, "all/one")
    (folder / "state.json").write_text("{ }")
    seal(folder)
    with pytest.raises(RemoteError, match="no space"):
        remote.put_folder(folder, "all/one")
    assert remote.list_sealed("all") == set()
    # one that is pruned while it is copied is no error
    monkeypatch.setattr(Remote, "put_file", prune)
    remote.put_folder(folder, "all/one")
    assert remote.list_sealed("all") == set()


def refuse(*_: object) -> None:
    raise RemoteError("no space")


def prune(remote: Remote, path: Path, name: str, put_file: Any = Remote.put_file) -> None:
    shutil.rmtree(path.parent)
    put_file(remote, path, name)


def test_a_damaged_folder_is_not_fetched(remote: Remote, folder: Path, tmp_path: Path) -> None:
    remote.put_folder(folder, "one")
    (tmp_path / "zeros").write_bytes(bytes(256_000))
    remote.put_file(tmp_path / "zeros", "one/weights")
    with pytest.raises(UserError, match=r"one: .*weights: is damaged"):
        remote.get_folder("one", tmp_path / "back")
    assert not (tmp_path / "back").exists()
    remote.unseal("one")
    assert remote.list_sealed("") == set()


def test_what_is_absent(remote: Remote, folder: Path, tmp_path: Path) -> None:
    assert remote.read("nothing") is None
    remote.get_file("nothing", tmp_path / "x")
    assert not (tmp_path / "x").exists()
    remote.remove_folder("nothing")
    remote.put_folder(folder, "all/one")
    remote.remove_folder("all/one")
    assert remote.list_sealed("all") == set() and remote.read("all/one/state.json") is None


def test_errors_of_a_service_are_one_kind(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RemoteError, match="file"):
        Remote(f"file://{tmp_path}/file/inside").put_file(folder / "weights", "x")
    with pytest.raises(UserError, match=r"training\.mirror=nope://x: .*nope"):
        Remote("nope://x")
    with pytest.raises(UserError, match=r"training\.mirror=reference://x: .*'fo'"):
        Remote("reference://x")  # it needs more than a URL
    with pytest.raises(RemoteError, match=r"ftp://127\.0\.0\.1:1/x: .*refused"):
        Remote("ftp://127.0.0.1:1/x")  # it connects at once
