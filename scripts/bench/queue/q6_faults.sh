#!/usr/bin/env bash
# Q6. One GPU: SIGKILL in mid-run and continuation with equal bits (bf16, recorded graph), and a GPU of 24 GB emulated:
# which micro-batch `auto` takes, and whether the first validation still fits (3-4 min).
#     bash scripts/bench/queue/q6_faults.sh [--dry]        in the repository's root; multi30k in multi30k
set -u
OUT=${OUT:-build/q6}; mkdir -p "$OUT"; D=${DATA:-multi30k}; W=build/q6work; rm -rf $W; mkdir -p $W
PY=${PY:-python3}; export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$PWD; EXTRA=(); STEPS=400; EVERY=50; KILLS=(0.1 0.4 0.8); GB=(24 12)
if [[ ${1:-} == --dry ]]; then EXTRA=(device=cpu training.compile=off model.d_model=32 model.d_ff=64 model.n_heads=2 model.n_layers=1); STEPS=12; EVERY=3; KILLS=(0.1); GB=(); fi
$PY -m nmt.commands.prepare --config multi30k.yaml data.root=$D data.store=$W/store >"$OUT/prepare.log" 2>&1; echo "prepare: $?"
ARGS=(--config multi30k.yaml data.root=$D data.store=$W/store training.steps=$STEPS training.checkpoint_every=$EVERY training.validate_every=$((STEPS / 2)) training.log_every=20 "${EXTRA[@]}")
s=$SECONDS; timeout 120 $PY -m nmt.commands.train "${ARGS[@]}" out=$W/whole >"$OUT/whole.log" 2>&1; echo "undisturbed: code $?, $((SECONDS - s)) s"
for after in "${KILLS[@]}"; do  # seconds after this start's first new checkpoint
    setsid $PY -m nmt.commands.train "${ARGS[@]}" out=$W/killed >>"$OUT/killed.log" 2>&1 & p=$!
    before=$(ls $W/killed/checkpoints 2>/dev/null | tail -1)
    for i in {1..600}; do [[ $(ls $W/killed/checkpoints 2>/dev/null | grep -c step-) -gt 0 && $(ls $W/killed/checkpoints | tail -1) != "$before" ]] && break; sleep 0.1; done
    sleep "$after"; kill -9 -- "-$p" 2>/dev/null; wait $p; echo "killed $after s after a checkpoint: code $?, $(ls $W/killed/checkpoints 2>/dev/null | tail -1)"
done
s=$SECONDS; timeout 120 $PY -m nmt.commands.train "${ARGS[@]}" out=$W/killed >>"$OUT/killed.log" 2>&1; echo "continued: code $?, $((SECONDS - s)) s (a warm start: inductor's cache is filled)"
$PY - "$W" <<'P'
import sys, pathlib
from safetensors.torch import load_file
w = pathlib.Path(sys.argv[1])
def last(run):
    return max((p for p in (w / run / "checkpoints").iterdir() if p.is_dir() and not p.is_symlink()), key=lambda p: int("".join(c for c in p.name if c.isdigit())))
a, b = last("whole"), last("killed"); n = same = 0
for f in sorted(a.glob("*.safetensors")):
    x, y = load_file(f), load_file(b / f.name)
    for k in x: n += 1; same += x[k].equal(y[k])
print(f"{a.name} and {b.name}: {same} of {n} tensors have the same bits")
P
# a smaller GPU: base, updates of 25,000 tokens, auto; then the first validation beside the training's memory
cat >$W/small.py <<'P'
import sys, torch
gb = float(sys.argv.pop(1)); total = torch.cuda.get_device_properties(0).total_memory; share = gb * 1e9 / total
real = torch.cuda.set_per_process_memory_fraction
torch.cuda.set_per_process_memory_fraction = lambda f, d=None: real(f * share)  # trials take 0.92 of the smaller GPU
real(share)
from nmt.commands.train import main
code = main(sys.argv[1:]); print("peak reserved GB", torch.cuda.max_memory_reserved() / 1e9); sys.exit(code)
P
for gb in "${GB[@]}"; do for size in base big; do
    s=$SECONDS
    timeout 170 $PY $W/small.py $gb --config $size.yaml data.root=$D data.train='[{src: "train.{src}", tgt: "train.{tgt}"}]' data.valid='{src: "valid.{src}", tgt: "valid.{tgt}"}' \
        data.test=null data.clean.preset=null data.store=$W/store vocab.size=10000 training.steps=12 training.validate_every=6 training.checkpoint_every=6 out=$W/$size$gb >"$OUT/$size$gb.log" 2>&1
    echo "$size on $gb GB: code $?, $((SECONDS - s)) s"; grep -hE "auto has chosen|error|memory|peak" "$OUT/$size$gb.log" | tail -4
done; done
