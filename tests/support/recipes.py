"""Recipes of which cards, --explain and verdicts are compared whole: each setting that one of them shows is
changed, alone where that is possible.
"""

from dataclasses import replace
from functools import cache

from nmt.config import RunConfig
from nmt.config_files import load_config, override_config
from support.untrained import list_shapes

# Of the paper's configs: each of these is one deviation.
FLIPS = {
    "base": (
        "model.norm=pre",
        "model.positions=learned",
        "model.window=8",
        "model.tied=false",
        "model.tied=decoder",
        "model.attention_bias=true",
        "model.projection_bias=true",
        "model.vocab_rows=40960",
        "model.n_layers=4",
        "model.encoder_layers=12",
        "model.decoder_layers=2",
        "model.attention_dropout=0.1",
        "model.ffn_dropout=0.1",
        "model.activation=gelu",
        "model.scale_embeddings=projection",
        "model.embedding_norm=before_dropout",
        "model.d_model=1024",
        "model.d_ff=1024",
        "model.n_heads=16",
        "model.d_k=16",
        "model.d_v=32",
        "model.dropout=0.3",
        "optimizer.beta1=0.95",
        "optimizer.beta2=0.997",
        "optimizer.eps=1e-8",
        "optimizer.warmup_steps=8000",
        "optimizer.scale=2",
        "optimizer.schedule=constant; optimizer.peak_lr=5e-4",
        "optimizer.weight_decay=0.01",
        "optimizer.schedule=cosine; optimizer.peak_lr=5e-4; optimizer.final_lr=1e-5",
        "training.label_smoothing=0",
        "training.src_tokens=4096",
        "training.tgt_tokens=32768",
        "training.steps=300000",
        "training.grouping=random",
        "training.keep_checkpoints=4",
        "training.checkpoint_every=1000",
        "training.checkpoint_every=600",
        "training.checkpoint_every=null",
        "training.init_from=runs/other",
        "training.clip_norm=1",
        "training.ema=0.999",
        "training.patience=5",
        "training.max_epochs=3",
        "training.max_hours=8",
        "training.freeze=[encoder]",
        "vocab.size=32000",
        "vocab.model=mine.model",
        "vocab.joint=false; model.tied=decoder",
        "vocab.tgt_size=9999; vocab.joint=false; model.tied=decoder",
        "vocab.bpe_dropout=0.1",
        "vocab.character_coverage=0.9995",
        "vocab.byte_fallback=true",
        "vocab.user_symbols=[<url>]",
        "vocab.sample_sentences=100000",
        "data.src=nl",
        "data.tgt=cs",
        "data.clean.max_words=100",
        "data.clean.max_ratio=9",
        "data.clean.max_pieces=100",
        "data.clean.max_pieces=null",
        "data.clean.identical=true",
        "data.clean.duplicates=true",
        "data.clean.held_out=drop-pairs",
        "data.test={sacrebleu: wmt14}",
        "data.valid={sacrebleu: wmt12}",
        "data.train=[{src: mine.en, tgt: mine.de}]",
        "data.temperature=5",
        "decoding.beam=5",
        "decoding.lower_capitals=true",
        "decoding.penalty=length",
        "decoding.length_penalty=1",
        "decoding.max_extra=100",
        "decoding.max_ratio=2",
        "decoding.min_length=1",
        "decoding.no_repeat_ngram=3",
        "decoding.finishing=top",
        "decoding.stopping=full",
        "decoding.sample=true",
        "decoding.max_source=100",
    ),
    "big": (
        "model.dropout=0.1",
        "model.d_ff=8192",
        "model.tied=false",
        "training.keep_checkpoints=5",
        "training.checkpoint_every=1500",
        "training.grouping=random",
        "training.steps=100000",
    ),
    "base-enfr": (
        "vocab.size=37000",
        "data.clean.max_words=null",
        "data.clean.max_ratio=null",
        "data.train=[{src: mine.en, tgt: mine.fr}]",
        "data.test={sacrebleu: wmt14}",
    ),
    "big-enfr": (
        "model.dropout=0.3",
        "model.d_ff=8192",
        "training.checkpoint_every=1500",
    ),
}
# Corpora, which are recognised by their names, and what is none or more than one deviation.
OTHERS = (
    "data.test={sacrebleu: wmt14/full}",
    "data.test={dataset: wmt/wmt14, subset: de-en, split: test}",
    "data.test={dataset: wmt14, subset: de-en, split: test}",
    "data.test={dataset: wmt/wmt14, subset: de-en, split: validation}",
    "data.test={dataset: wmt/wmt14, subset: de-en}",  # the training text, then
    "data.test={src: sets/newstest2014.en.gz, tgt: sets/newstest2014.de.gz}",
    "data.test={src: newstest2014.de, tgt: newstest2014.en}",
    "data.test=null",
    "data.valid={archive: dev.tgz, src: dev/newstest2013.en, tgt: dev/newstest2013.de}",
    "data.valid={sacrebleu: wmt13}",
    "data.valid={src: newstest2012.en, tgt: newstest2012.de}",
    "data.valid=null",
    "data.train=[]",
    "data.train=[{src: a.en, tgt: a.de}, {demo: train}]",
    "data.train=[{dataset: wmt14, subset: de-en}]",
    "data.train=[{dataset: wmt14, subset: de-en}, {dataset: wmt14, subset: de-en}]",
    "data.train=[{dataset: wmt/wmt14, subset: fr-en, split: train}]",
    "data.train=[{dataset: someone/wmt14, subset: de-en}]",
    "data.train=[{dataset: wmt/wmt14, subset: de-en}, {file: more.tsv}]",
    "data.train=[{dataset: wmt/wmt14, subset: de-en}, {dataset: wmt/wmt14, subset: de-en}]",
    "data.train=[{src: commoncrawl.de-en.en.xz, tgt: commoncrawl.de-en.de.xz}, {src: p/europarl-v7.de-en.en, "
    "tgt: p/europarl-v7.de-en.de}, {src: news-commentary-v9.de-en.en, tgt: news-commentary-v9.de-en.de}]",
    # what tensor2tensor trains on
    "data.train=[{src: commoncrawl.de-en.en, tgt: commoncrawl.de-en.de}, {src: p/europarl-v7.de-en.en, "
    "tgt: p/europarl-v7.de-en.de}, {src: news-commentary-v13.de-en.en, tgt: news-commentary-v13.de-en.de}]",
    "data.tgt=fr",
    "license=cc-by-4.0",
    "model.n_layers=4; model.encoder_layers=6; model.decoder_layers=6",
    "model.tied=embeddings",
    "model.scale_embeddings=none",
    "model.attention_dropout=0.1; model.ffn_dropout=0.2",
    "optimizer.schedule=inverse_sqrt; optimizer.peak_lr=0.001",
    "decoding.penalty=none",
    "decoding.max_ratio=1.5; decoding.max_extra=10",
    "decoding.preset=fairseq",
    "decoding.preset=marian",
    "decoding.preset=hf",
    "model.norm=pre; optimizer.eps=1e-8",
)
SHIPPED = ("base-released", "big-released", "demo", "multi30k")


@cache
def list_recipes() -> dict[str, RunConfig]:
    """By their names; `base: model.norm=pre` is base.yaml with this change."""
    recipes = {}
    for name, flips in FLIPS.items():
        recipes[name] = config = load_config(f"{name}.yaml")
        for changes in (*flips, *(OTHERS if name == "base" else ())):
            recipes[f"{name}: {changes}"] = override_config(config, changes.split("; "))
    small = override_config(recipes["base"], ["vocab.size=300"])
    for name, shape in list_shapes(256).items():
        recipes[f"base: a small model, {name}"] = replace(small, model=shape)
    for name in SHIPPED:
        recipes[f"base: {name}.yaml"] = load_config(f"{name}.yaml")
    return recipes
