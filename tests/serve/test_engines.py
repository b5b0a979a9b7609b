"""How a server uses the cores and the network: how many batches at a time, and answers without delay."""

import socket
from pathlib import Path

import torch
from support.needs import needs_package
from support.untrained import make_checkpoint

from nmt.api import open_model
from nmt.checkpoint.run_checkpoints import open_checkpoint
from nmt.data.vocab import Vocab
from nmt.extras.export.ctranslate2 import open_ctranslate2
from nmt.extras.export.export import export
from nmt.extras.serve.batcher import count_search_threads
from nmt.extras.serve.models import ServedModel
from nmt.extras.serve.server import open_socket


@needs_package("ctranslate2")
def test_each_core_has_a_batch(vocab: Vocab, tmp_path: Path) -> None:
    place = make_checkpoint(tmp_path / "average", vocab)
    export(open_checkpoint(place), "ctranslate2", tmp_path / "ct2", "float32", ["a dog"])
    n_before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        exports = [
            ServedModel(open_ctranslate2([str(tmp_path / "ct2")], ["device=cpu"], True))
            for _ in range(2)
        ]
        ours = ServedModel(open_model([str(place)], ["device=cpu"]))
        assert count_search_threads(exports) == 3
        assert count_search_threads([*exports, ours]) == 3
    finally:
        torch.set_num_threads(n_before)


def test_an_answer_is_sent_at_once() -> None:
    """Else Nagle's algorithm would hold the second part of each answer back for 40 ms."""
    with open_socket("127.0.0.1", 0) as listener:
        with socket.create_connection(listener.getsockname()):
            connection, _ = listener.accept()
            with connection:
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
