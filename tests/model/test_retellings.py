"""Each shipped retelling of the paper is the model that its code describes: built a second time from
torch's own modules, from facts written down here and not from the config.
"""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from pytest import mark
from support.checkout import ROOT
from support.torch_twin import make_torch_twin
from torch import Tensor, nn

from nmt.config import ModelConfig
from nmt.config_files import find_shipped_configs, load_config
from nmt.data.batch import pack
from nmt.model.positions import sinusoids
from nmt.model.transformer import Transformer
from nmt.paper import check_conformance, explain

V, D = 23, 16
SRC = [[5, 6, 7, 3], [8, 3], [9, 10, 11, 12, 13, 3]]
TGT = [[2, 14, 15], [2, 16, 17, 18, 19], [2]]


class Facts(NamedTuple):
    """What a retelling's code does; dropouts are on attention weights, and after the activation."""

    is_pre: bool
    has_bias: bool
    n_matrices: int
    embeddings_times: float
    logits_times: float
    has_embedding_norm: bool
    dropouts: tuple[float, float]
    has_authors_rates: bool = False  # of sinusoids


SQRT_D = math.sqrt(D)
RETELLINGS = {
    "jadore801120": Facts(False, False, 1, 1.0, 1 / SQRT_D, True, (0.1, 0.0)),
    "tensor2tensor": Facts(True, False, 1, SQRT_D, 1.0, False, (0.1, 0.1), True),
    "fairseq": Facts(False, True, 1, SQRT_D, 1.0, False, (0.0, 0.0), True),
    "opennmt-py": Facts(True, False, 3, SQRT_D, 1.0, False, (0.1, 0.1)),
    "joeynmt": Facts(True, True, 1, SQRT_D, 1.0, False, (0.1, 0.1)),
    "annotated-transformer": Facts(True, True, 3, SQRT_D, 1.0, False, (0.1, 0.1)),
    "marian": Facts(False, True, 1, SQRT_D, 1.0, False, (0.0, 0.0), True),
}


def shrink(name: str) -> ModelConfig:
    return replace(load_config(f"{name}.yaml").model, d_model=D, d_ff=24, n_heads=4, n_layers=2)


def test_every_shipped_retelling_is_known_here() -> None:
    shipped = {path.stem for path in (find_shipped_configs() / "retellings").glob("*.yaml")}
    assert shipped == RETELLINGS.keys()
    document = (ROOT / "docs" / "recipe.md").read_text()
    assert shipped <= set(re.findall(r"^\| `([\w-]+)\.yaml` ", document, re.MULTILINE))


@mark.parametrize("name", RETELLINGS)
def test_its_config_states_its_facts_and_its_deviations(name: str) -> None:
    config, facts = load_config(f"{name}.yaml"), RETELLINGS[name]
    model = config.model
    assert config.name == name and (model.norm == "pre") is facts.is_pre
    assert model.attention_bias is facts.has_bias
    assert (model.attention_dropout, model.ffn_dropout) == facts.dropouts
    base = load_config("base.yaml")
    assert (config.data, config.vocab) == (base.data, base.vocab)  # one store serves all
    found = check_conformance(config)
    assert (found.model, found.pair) == ("base", "en-de")
    assert f"\n{len(found.deviations)} deviations from" in explain(config)
    # what it says is what differs: each row is a setting that the file itself gives or presets
    text = (find_shipped_configs() / "retellings" / f"{name}.yaml").read_text()
    for row in found.deviations:
        section, key = str(row.key).split(".")
        assert f"\n{section}:" in text and (f"  {key}: " in text or "  preset: " in text), row.key


@mark.parametrize("name", RETELLINGS)
def test_it_equals_a_model_of_torchs_modules_in_float64(name: str) -> None:
    facts = RETELLINGS[name]
    torch.manual_seed(1)
    model = Transformer(shrink(name), V).double().eval()
    with torch.no_grad():
        for p in model.parameters():  # biases and norms too must matter
            p.add_(torch.randn_like(p), alpha=0.05)
    encoder, decoder = make_torch_twin(model)
    matrices = [model.src_embedding.weight, model.tgt_embedding.weight, model.projection.weight]
    copies = {id(matrix): matrix.detach().clone().requires_grad_() for matrix in matrices}
    assert len(copies) == facts.n_matrices
    source, target, projection = (copies[id(matrix)] for matrix in matrices)
    norms = [nn.LayerNorm(D).double() if facts.has_embedding_norm else nn.Identity() for _ in "12"]
    if facts.has_embedding_norm:
        norms[0].load_state_dict(model.src_embedding_norm.state_dict())
        norms[1].load_state_dict(model.tgt_embedding_norm.state_dict())

    def embed(ids: list[int], table: Tensor, norm: Callable[[Tensor], Tensor]) -> Tensor:
        x = F.embedding(torch.tensor(ids), table) * facts.embeddings_times
        return norm(x + sinusoids(len(ids), D, facts.has_authors_rates).double())[None]

    logits = []
    for src, tgt in zip(SRC, TGT, strict=True):
        causal = nn.Transformer.generate_square_subsequent_mask(len(tgt), dtype=torch.float64)
        memory = encoder(embed(src, source, norms[0]))
        hidden = decoder(embed(tgt, target, norms[1]), memory, tgt_mask=causal)[0]
        logits.append(facts.logits_times * hidden @ projection.T)
    theirs, ours = torch.cat(logits), model.projection(model(pack(SRC), pack(TGT)))
    assert (ours - theirs).abs().max() < 1e-10

    # the gradients of what exists under one name on both sides
    weight = torch.randn_like(theirs)
    layer, twin = model.encoder[0], encoder.get_submodule("layers.0")
    last, last_twin = model.decoder[-1], decoder.get_submodule("layers.1")
    mine = [
        layer.attention.qkv.weight,
        layer.feed_forward.inner.weight,
        last.memory_attention.output.weight,
        last.feed_forward_residual.norm.weight,
        model.projection.weight,
    ]
    others = [
        twin.get_submodule("self_attn").get_parameter("in_proj_weight"),
        twin.get_parameter("linear1.weight"),
        last_twin.get_parameter("multihead_attn.out_proj.weight"),
        last_twin.get_parameter("norm3.weight"),
        projection,
    ]
    found = torch.autograd.grad((ours * weight).sum(), mine)
    for a, b in zip(found, torch.autograd.grad((theirs * weight).sum(), others), strict=True):
        assert (a - b).abs().max() < 1e-10 * max(1.0, float(b.abs().max()))
