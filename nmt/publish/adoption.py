"""A model of other hands as a checkpoint folder: the same tensors by our names, its rows in the order of our ids.

Nothing is approximated. Where their search begins with another piece than <s>, that piece's row is our <s> in the
target embedding, while the projection keeps theirs; so the three matrices part. A piece that they lack must weigh
nothing in the softmax, and a bias on logits must stay: for both the last LayerNorm gives a direction that is constant.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import layer_norm

from nmt.averaging import averaged_in, check_place
from nmt.checkpoint import CONFIG, MODEL, SMALL, STATE, VOCAB
from nmt.config import DataConfig, ModelConfig, RunConfig, VocabConfig, changed, dump
from nmt.data.vocab import BOS, PAD
from nmt.errors import Failure, UserError
from nmt.files import write_folder, write_json, write_text
from nmt.model.transformer import Transformer
from nmt.publish.agreement import Agreement, Ours, bound, compare
from nmt.publish.export import made_lines
from nmt.publish.marian import Theirs
from nmt.publish.origin import Origin, said

NOTHING = -1000.0  # the logit of a piece that does not exist
NOISE = 1e-5  # how much rounding may move each unit of a bias; usual are 2e-6
LIMIT = 60  # pieces of an output that is compared
Weights = dict[str, Tensor]


def adopt(origin: Origin, out: Path) -> Agreement | None:
    """Write the folder `out`, or raise and leave everything as it was. What the comparison with the engine of the
    origin found, or None where there is no such engine."""
    out = out.resolve()
    check_place(out)
    if os.path.lexists(out) and not is_import(out):
        raise UserError(f"{out}: exists and is not just an import; choose another -o DIR, nothing was changed")
    weights, shape = weights_of(origin)
    config = config_of(origin, shape)
    if len(origin.vocab.model) > SMALL[VOCAB]:
        raise UserError(f"{origin.path}: its SentencePiece model is too large for a checkpoint")
    found = None
    if origin.kind == "huggingface" and find_spec("transformers") is not None:
        found = checked(origin, config, weights)

    def fill(folder: Path) -> None:
        try:
            save_file(weights, folder / MODEL, metadata={"format": "pt"})
        except SafetensorError as error:
            raise Failure(f"{out}: cannot be written: {said(str(error))[1:-1]}; nothing was changed") from None
        write_json(folder / STATE, {"averaged": [f"{origin.kind}:{origin.path.resolve().name}"], "step": origin.step})
        write_text(folder / CONFIG, dump(config))
        (folder / VOCAB).write_bytes(origin.vocab.model)

    write_folder(out, fill)
    return found


def is_import(folder: Path) -> bool:
    """Whether `folder` is what `adopt` wrote and nothing else, or empty: then it may be replaced."""
    known = averaged_in(folder)
    return known == [] or (known is not None and len(known) == 1
                           and known[0].startswith(("huggingface:", "fairseq:")))


def config_of(origin: Origin, shape: ModelConfig) -> RunConfig:
    data, longest = DataConfig(), DataConfig().clean.max_pieces
    src, tgt = origin.languages
    if src and tgt and src != tgt:
        data = replace(data, src=src, tgt=tgt)
    if shape.positions == "learned" and longest is not None and longest >= shape.max_positions:
        data = replace(data, clean=replace(data.clean, max_pieces=max(1, shape.max_positions - 1)))
    name = re.sub(r"[^\w.-]+", "-", origin.path.resolve().name.removesuffix(".pt"))
    size = min(max(origin.vocab.size, 16), 65_535)  # what a store could hold; the model has as many as it has
    try:
        return changed(RunConfig(name=name, data=data, vocab=VocabConfig(size=size), model=shape), ())
    except UserError as error:
        raise UserError(f"{origin.path}: {error}") from None


def weights_of(origin: Origin) -> tuple[Weights, ModelConfig]:
    tensors, shape = origin.tensors, origin.shape
    weights = dict(layers(origin))
    if shape.norm == "pre":
        for side in ("encoder", "decoder"):
            weights |= norm(origin, f"{side}.layer_norm", f"{side}_norm")
    tensors.finish()
    biases = [name for name in weights if "attention." in name and name.endswith(".bias")]
    if has_biases := any(bool(weights[name].any()) for name in biases):
        biases = []
    weights = {name: value for name, value in weights.items() if name not in biases}
    last = "decoder_norm" if shape.norm == "pre" else f"decoder.{shape.n_layers - 1}.feed_forward_residual.norm"
    src, tgt, projection, bias = matrices(origin)
    if bias.any():
        projection, weights[f"{last}.bias"] = biased(
            origin, projection, bias, weights[f"{last}.weight"], weights[f"{last}.bias"])
    is_tied = torch.equal(src, tgt) and torch.equal(tgt, projection)
    weights["tgt_embedding.weight"] = tgt
    if not is_tied:
        weights |= {"src_embedding.weight": src, "projection.weight": projection}
    if origin.tables is not None:
        weights |= {f"{side}_positions.table": t for side, t in zip(("src", "tgt"), origin.tables, strict=True)}
    return weights, replace(shape, tied=is_tied, attention_bias=has_biases)


def layers(origin: Origin) -> Iterator[tuple[str, Tensor]]:
    take, shape = origin.tensors.take, origin.shape
    d = shape.d_model

    def products(theirs: str, ours: str, parts: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{ours}.weight", torch.cat([take(f"{theirs}.{part}_proj.weight", d, d) for part in parts.split()])
        yield f"{ours}.bias", torch.cat([take(f"{theirs}.{part}_proj.bias", d) for part in parts.split()])

    for side in ("encoder", "decoder"):
        for i in range(shape.n_layers):
            theirs, ours = f"{side}.layers.{i}", f"{side}.{i}"
            yield from products(f"{theirs}.self_attn", f"{ours}.attention.qkv", "q k v")
            yield from products(f"{theirs}.self_attn", f"{ours}.attention.output", "out")
            yield from norm(origin, f"{theirs}.self_attn_layer_norm", f"{ours}.attention_residual.norm").items()
            if side == "decoder":
                yield from products(f"{theirs}.encoder_attn", f"{ours}.memory_attention.q", "q")
                yield from products(f"{theirs}.encoder_attn", f"{ours}.memory_attention.kv", "k v")
                yield from products(f"{theirs}.encoder_attn", f"{ours}.memory_attention.output", "out")
                yield from norm(origin, f"{theirs}.encoder_attn_layer_norm", f"{ours}.memory_residual.norm").items()
            for name, part, rows, columns in (("fc1", "inner", shape.d_ff, d), ("fc2", "outer", d, shape.d_ff)):
                yield f"{ours}.feed_forward.{part}.weight", take(f"{theirs}.{name}.weight", rows, columns)
                yield f"{ours}.feed_forward.{part}.bias", take(f"{theirs}.{name}.bias", rows)
            yield from norm(origin, f"{theirs}.final_layer_norm", f"{ours}.feed_forward_residual.norm").items()


def norm(origin: Origin, theirs: str, ours: str) -> Weights:
    return {f"{ours}.{part}": origin.tensors.take(f"{theirs}.{part}", origin.shape.d_model)
            for part in ("weight", "bias")}


def matrices(origin: Origin) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Source embedding, target embedding and projection, a row for each of our pieces, and what is to be added to the
    logit of each."""
    rows, (src, tgt, projection) = origin.rows, origin.embeddings
    src_ids, tgt_ids, ids = ([rows.unk if row is None else row for row in each]
                             for each in (rows.src, rows.tgt, rows.tgt))
    tgt_ids[BOS] = rows.start
    src_ids[BOS], src_ids[PAD], tgt_ids[PAD] = tgt_ids[BOS], ids[PAD], ids[PAD]  # two of them are never looked up
    bias = torch.zeros(len(ids)) if origin.bias is None else origin.bias[ids]
    made, absent = projection[ids], torch.tensor([row is None for row in rows.tgt])
    made[absent], bias[absent] = 0.0, NOTHING
    return src[src_ids], tgt[tgt_ids], made, bias


def biased(origin: Origin, projection: Tensor, bias: Tensor, gain: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """A projection without bias, and another shift of the last LayerNorm, for which the logits are the same.

    The norm gives h = gain * x + shift, its x sum to zero, and only the projection sees h. So u = 1 / (gain * total),
    where total = sum(shift / gain), has u . h = 1 always: b times u in a row is a bias b. Rounding matters least where
    total is large; therefore gain itself is first added to the shift, and taken back from each row in the same way.
    """
    g = gain.double()
    moved = shift + gain.copysign(gain * (shift.double() / g).sum())  # away from a total of zero, by d_model
    u = 1 / (g * (moved.double() / g).sum())
    bias = bias.double() - projection.double() @ (moved.double() - shift.double())
    result = (projection.double() + bias[:, None] * u).float()
    probe = torch.randn(1000, len(gain), generator=torch.Generator().manual_seed(1))
    noise = (layer_norm(probe, gain.shape, gain, moved) @ u.float() - 1).abs().max()  # from rounding in fp32
    if not noise < NOISE:  # also where it is no number
        raise UserError(f"{origin.path}: its last LayerNorm has weights of zero, so that it cannot carry a "
                        "bias of logits, which this model lacks, or rule out a piece that is not there")
    return result, moved


def checked(origin: Origin, config: RunConfig, weights: Weights) -> Agreement:
    """Hold the model against the engine it is from, on lines of random pieces."""
    theirs = Theirs(origin.path, origin.rows, origin.vocab)
    model = Transformer(config.model, origin.vocab.size)
    model.load_state_dict(weights, strict=False)  # strict would ask for a tied matrix by each of its names
    lines = made_lines(origin.vocab)
    theirs.check_pieces(lines)
    limit = min(LIMIT, config.model.max_positions - 1)
    src = [ids[:limit] for ids in origin.vocab.encode(lines) if ids]
    agreement = compare(Ours(model), theirs, src, limit)
    if not agreement.is_within("float32"):
        raise Failure(f"the import does not say the same: {agreement}; bound: {bound('float32')}; nothing was written")
    return agreement
