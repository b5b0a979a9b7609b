#!/usr/bin/env bash
# Base on 1.96M pairs of Europarl v7 English-French (part of WMT14's own training text), as far as MINUTES of one GPU go; average,
# BLEU on newstest2013, newstest2014 and held-out debates. In the project's root, in steps that each end within ten minutes:
#     bash scripts/bench/queue/q8_europarl.sh take FOLDER     # once for each folder with a part of the text: moves what is in it to $WORK/in
#     bash scripts/bench/queue/q8_europarl.sh prepare         # a minute on 16 cores
#     bash scripts/bench/queue/q8_europarl.sh train           # MINUTES (7), compilation included; then average and scores, half a minute more
#     bash scripts/bench/queue/q8_europarl.sh bring 1         # half of the averaged weights, in bf16, as files of 15 MiB in $OUT; then bring 2
#     bash scripts/bench/queue/q8_europarl.sh --dry FOLDER    # all of it on a CPU, tiny
# The text: train-{1,2,3,4}.{en,fr}.xz, {valid,test}.{en,fr}.xz, newstest201{3,4}.{en,fr}. WORK lies outside the project.
set -u
OUT=${OUT:-build/q8}; WORK=${WORK:-$HOME/q8work}; PY=${PY:-python3}; MINUTES=${MINUTES:-7}; VOCAB=${VOCAB:-32000}
DEV=(); EXTRA=(); HEAD=cat; mkdir -p "$OUT" "$WORK/in" "$WORK/text"; export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$PWD
step=${1:-}; shift
if [[ $step == --dry ]]; then
    MINUTES=0.4; VOCAB=2000; HEAD="head -n 3000"; DEV=(device=cpu)
    EXTRA=(device=cpu training.compile=off model.d_model=64 model.d_ff=128 model.n_heads=2 model.n_layers=1 training.src_tokens=2000 training.tgt_tokens=2000 training.checkpoint_every=50)
fi
t=$SECONDS; note() { echo "== $1: code $2, $((SECONDS - t)) s"; t=$SECONDS; }
take() { mv "$1"/* "$WORK/in/" && ls -l "$WORK/in" | awk '{print $5, $9}'; }
prepare() {
    local f p T="" l s
    for f in "$WORK"/in/*.xz; do (xz -dc "$f" | $HEAD >"$WORK/text/$(basename "$f" .xz)") & done; wait
    for p in 1 2 3 4; do [[ -f $WORK/text/train-$p.en ]] && T="$T{src: train-$p.en, tgt: train-$p.fr}, "; done
    cat >"$WORK/run.yaml" <<Y
extends: base-enfr.yaml
data: {root: $WORK/text, store: $WORK/store, workers: $(nproc), train: [${T%, }], valid: {src: valid.en, tgt: valid.fr}, test: {src: test.en, tgt: test.fr}}
vocab: {size: $VOCAB}
training: {max_hours: $(awk "BEGIN{print $MINUTES / 60}"), checkpoint_every: 500, validate_every: 2500, keep_checkpoints: 12, checkpoint_minutes: null}
Y
    $PY -m nmt.commands.prepare --config "$WORK/run.yaml" "${DEV[@]}" >"$OUT/prepare.log" 2>&1; note prepare $?; tail -n 3 "$OUT/prepare.log"
}
train() {
    $PY -m nmt.commands.train --config "$WORK/run.yaml" out="$WORK/run" "${EXTRA[@]}" >"$OUT/train.log" 2>&1; note train $?
    grep -E "^update|done|warning" "$OUT/train.log" | tail -n 12; cp "$WORK/run/metrics.jsonl" "$WORK/run/config.yaml" "$OUT/" 2>/dev/null
}
score() {
    local M=$WORK/run/average c s e f set
    $PY -m nmt.commands.average "$WORK/run" --last 5 >"$OUT/average.log" 2>&1; c=$?; note average $c; [[ $c == 0 ]] || M=$WORK/run
    for set in test newstest2013 newstest2014; do
        f=$WORK/in/$set; [[ $set == test ]] && f=$WORK/text/test; [[ -f $f.en ]] || continue
        s=$(date +%s.%N); $PY -m nmt.commands.translate "$M" "${DEV[@]}" <"$f.en" >"$OUT/$set.fr" 2>>"$OUT/translate.log"; e=$(date +%s.%N)
        echo "$set: $($PY -m sacrebleu "$f.fr" -i "$OUT/$set.fr" -m bleu chrf --confidence 2>>"$OUT/score.log" | tr -d '\n' | tr -s ' ') ($(wc -l <"$OUT/$set.fr") lines in $(awk "BEGIN{print $e - $s}") s, start and load included)"
    done | tee "$OUT/scores.txt"
    tail -c 300 "$OUT/translate.log"
}
bring() {  # half $1 of 2 of the average in bf16: cat the files of both in order, and it is one safetensors file
    [[ -f $WORK/bf16.safetensors ]] || $PY - "$WORK" <<'P'
import glob, sys
import torch
from safetensors.torch import load_file, save_file
weights = load_file(glob.glob(f"{sys.argv[1]}/run/average/*.safetensors")[0])
save_file({name: value.to(torch.bfloat16) for name, value in weights.items()}, f"{sys.argv[1]}/bf16.safetensors")
P
    rm -f "$OUT"/*; split -b 15728640 -d -a 2 "$WORK/bf16.safetensors" "$WORK/bf16.part"
    local parts=("$WORK"/bf16.part*); local half=$(((${#parts[@]} + 1) / 2))
    if [[ $1 == 1 ]]; then cp "${parts[@]:0:half}" "$OUT/"; else cp "${parts[@]:half}" "$OUT/"; cp "$WORK"/run/average/{vocab.model,config.yaml,state.json} "$OUT/" 2>/dev/null; fi
    sha256sum "$WORK/bf16.safetensors"; ls -l "$OUT" | awk '{print $5, $9}'
}
case $step in
    take) take "$1" ;;
    prepare) prepare ;;
    train) train; score ;;
    score) score ;;
    bring) bring "$1" ;;
    --dry) WORK=build/q8work; rm -rf $WORK; mkdir -p $WORK/in $WORK/text; cp "$1"/* $WORK/in/; WORK=$PWD/$WORK; prepare; train; score; bring 1 ;;
    *) echo "take FOLDER, prepare, train, score, bring 1, bring 2 or --dry FOLDER" >&2; exit 2 ;;
esac
