"""The Python of docs/examples.md runs as it stands there."""

import re
from pathlib import Path

import torch
from pytest import MonkeyPatch, mark
from support.capture import Capture
from support.checkout import ROOT
from support.untrained import SHAPE, make_checkpoint

from nmt.data.vocab import Vocab
from nmt.system.strict_json import Fields

PAGE = ROOT / "docs" / "examples.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@mark.parametrize("block", BLOCKS)
def test_the_block_runs(
    block: str,
    vocab: Vocab,
    tmp_path: Path,
    monkeypatch: MonkeyPatch,
    capsys: Capture,
) -> None:
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    make_checkpoint(tmp_path / "runs" / "demo" / "average", vocab)
    monkeypatch.chdir(tmp_path)
    names: Fields = {}
    exec(block, names)
    if "decoded" in names:
        weights = names["weights"]
        assert weights.triu(1).count_nonzero() == 0 and weights.shape == (5, 5)
        assert torch.allclose(names["output"], weights @ names["decoded"] @ names["w_v"], atol=1e-4)
    else:
        assert names["encoded"].shape == (len(names["sentences"].tokens), SHAPE.d_model)
        assert "one dog sees two cats tensor(" in capsys.readouterr().out
