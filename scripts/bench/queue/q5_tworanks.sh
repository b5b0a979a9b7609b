#!/usr/bin/env bash
# Q5. Two NCCL ranks on ONE GPU, for real (5-6 min). NCCL refuses two ranks on one GPU of one host; NCCL_HOSTID lets each
# rank believe in a host of its own, so sums go over loopback sockets (others measured 13-17 ms a collective, because the
# two processes take turns on the GPU). Shows: graphs with captured sums of 2 ranks, ZeRO shares, two runs with equal bits,
# sums outside of graphs (training.compile=sums_apart), SIGKILL and continuation, continuation on another number of ranks, and whether the processes end (destroy_process_group
# waits for ever while a CUDA graph with captured sums lives: docs.nvidia.com/dl-cuda-graph, "Process Hang").
#     bash scripts/bench/queue/q5_tworanks.sh [--dry]       in the repository's root, multi30k in multi30k; --dry: CPU, gloo
set -u
OUT=${OUT:-build/q5}; mkdir -p "$OUT"; D=${DATA:-multi30k}; W=build/q5work; rm -rf $W; mkdir -p $W
PY=${PY:-python3}; export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$PWD; STEPS=60; HALF=30; EXTRA=()
SIZE=(model.d_model=256 model.d_ff=1024 model.n_heads=4 model.n_layers=3)
if [[ ${1:-} == --dry ]]; then EXTRA=(device=cpu training.compile=off); STEPS=8; HALF=4; SIZE=(model.d_model=32 model.d_ff=64 model.n_heads=2 model.n_layers=2); fi
ARGS=(--config multi30k.yaml data.root=$D data.store=$W/store "${SIZE[@]}" training.precision=${PRECISION:-fp32} optimizer.scale=0.2 optimizer.warmup_steps=20 model.dropout=0.1
      training.src_tokens=4000 training.tgt_tokens=4000 training.micro_tokens=1032 training.checkpoint_every=$((HALF / 3 + 1)) training.validate_every=1000
      training.log_every=5 training.steps=$STEPS "${EXTRA[@]}")
t=$SECONDS; note() { echo "== $1: code $2, $((SECONDS - t)) s"; t=$SECONDS; }
one() { timeout -k 5 150 $PY -m nmt.commands.train "${ARGS[@]}" "$@"; }
PORT=$((29600 + RANDOM % 300))
two() {  # ARGS...: both ranks on cuda:0. KILL_AT: a run folder; SIGKILL to both after its first checkpoint
    PORT=$((PORT + 1)); local groups=() r code=0 p
    for r in 0 1; do
        setsid env RANK=$r WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$PORT OMP_NUM_THREADS=1 NCCL_HOSTID=rank$r \
            NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_DEBUG=WARN \
            timeout -k 5 120 $PY -m nmt.commands.train "${ARGS[@]}" "$@" >"$OUT/two$PORT-$r.log" 2>&1 &
        groups+=($!)
    done
    if [[ -n ${KILL_AT:-} ]]; then for p in {1..1000}; do compgen -G "$KILL_AT/checkpoints/step-*" >/dev/null && break; sleep 0.1; done; sleep 0.3; for p in "${groups[@]}"; do kill -9 -- "-$p" 2>/dev/null; done; fi
    for p in "${groups[@]}"; do wait "$p" || code=$?; done
    tail -n 1 "$OUT/two$PORT-0.log"; return $code
}
$PY -m nmt.commands.prepare --config multi30k.yaml data.root=$D data.store=$W/store >"$OUT/prepare.log" 2>&1; note prepare $?
one out=$W/one >"$OUT/one.log" 2>&1; note "one rank" $?
two out=$W/two; note "two ranks (124: they hang, perhaps in destroy_process_group)" $?
two out=$W/again; note "two ranks once more" $?
two out=$W/apart training.compile=sums_apart; note "two ranks, nothing that they send recorded" $?
KILL_AT=$W/killed two out=$W/killed; note "two ranks, SIGKILL after the first checkpoint (137)" $?
ls $W/killed/checkpoints 2>/dev/null | tail -2
two out=$W/killed; note "two ranks continue" $?
one out=$W/mixed training.steps=$HALF >"$OUT/mixed1.log" 2>&1; note "one rank, half of it" $?
two out=$W/mixed; note "continued by two ranks" $?
grep -hiE "warning|error" "$OUT"/*.log | sort | uniq -c | head -20
$PY - "$W" <<'P'
import sys, pathlib
from safetensors.torch import load_file
w = pathlib.Path(sys.argv[1])
def last(run):
    found = [p for p in (w / run / "checkpoints").iterdir() if p.is_dir() and not p.is_symlink() and (p / "model.safetensors").exists()]
    newest = max(found, key=lambda p: int("".join(c for c in p.name if c.isdigit())))
    return load_file(newest / "model.safetensors"), newest.name
def compare(a, b, what):
    try: (x, nx), (y, ny) = last(a), last(b)
    except Exception as e: return print(what, "missing:", type(e).__name__, e)
    worst = max(float((x[k] - y[k]).norm() / x[k].norm().clamp(min=1e-30)) for k in x)
    print(f"{what}, {nx} and {ny}: {'the same bits' if all(x[k].equal(y[k]) for k in x) else f'worst tensor differs by {worst:.1e}'}")
compare("two", "again", "the same on two ranks, twice")
compare("two", "apart", "sums within the graph and outside")
compare("two", "killed", "two ranks, killed and continued")
compare("one", "two", "one rank and two (fp32: expect < 1e-5)")
compare("one", "mixed", "one rank, continued by two (fp32: expect < 1e-5)")
P
