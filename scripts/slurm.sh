#!/bin/bash
# A Slurm job that trains on one node or many, and comes back by itself until the run is done. From the checkout:
#     sbatch --nodes 2 --gpus-per-node 8 --cpus-per-task 64 --time 24:00:00 \
#         scripts/slurm.sh --config big.yaml out=/shared/runs/big data.store=/shared/wmt14
# With --array each %a in the arguments becomes the number of the task, one run each:
#     sbatch --array 1-5 scripts/slurm.sh --config big.yaml seed=%a out=/shared/runs/big-%a data.store=/shared/wmt14
# --cpus-per-task is for all ranks of a node together. Without it Slurm gives them a single core; the
# 8 below suffice for one or two GPUs, so ask for more where there are more: 8 for each GPU is plenty,
# fewer than 2 slow training down.
# Three minutes before its time is up Slurm sends SIGUSR1 to this script, which hands it on to launch.sh on every node;
# the run saves and ends, and the job is queued again. What the run wrote to status.json decides; srun's code only where
# it wrote nothing.
#SBATCH --job-name=nmt
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
set -euo pipefail

max_requeues=${NMT_MAX_REQUEUES:-20}
launch=${NMT_LAUNCH:-scripts/launch.sh}  # Slurm runs a copy of this script, so it cannot look beside itself

[[ -n ${SLURM_JOB_ID-} ]] || { echo "slurm.sh: error: not inside a job; start it with sbatch" >&2; exit 2; }
[[ -x $launch ]] || { echo "slurm.sh: error: no $launch in $PWD; run sbatch in the checkout" >&2; exit 2; }
job=$SLURM_JOB_ID
if [[ -n ${SLURM_ARRAY_TASK_ID-} ]]; then
    set -- "${@//%a/$SLURM_ARRAY_TASK_ID}"
    job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID  # the number of its last task is that of the whole array too
fi
folder=$("$launch" --print-folder -- "$@")

status() {
    cat -- "$folder/status.json" 2>/dev/null || true
}

field() {
    sed -nE "s/.*\"$1\": *\"?([a-z0-9]+).*/\1/p" <<<"$(status)"
}

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
main_host=$(head -n 1 <<<"$hosts"):$((20000 + SLURM_JOB_ID % 10000))  # jobs may share a node
many=()
[[ $SLURM_JOB_NUM_NODES -eq 1 ]] || many=(--hosts "$SLURM_JOB_NUM_NODES" --main-host "$main_host")

# srun hands SIGUSR1 on to its tasks, but answers SIGTERM by killing them: it must never be sent that.
step='' heard=''
hear() {
    [[ -z $heard ]] || return 0
    heard=$1
    echo "slurm.sh: SIG$1; the run saves and ends" >&2
    [[ -z $step ]] || kill -USR1 "$step" 2>/dev/null || true
}
trap 'hear USR1' USR1
trap 'hear TERM' TERM

cores=()  # since Slurm 22.05 srun no longer takes them over from sbatch by itself
[[ -z ${SLURM_CPUS_PER_TASK-} ]] || cores=("--cpus-per-task=$SLURM_CPUS_PER_TASK")
before=$(status)
# One task a node; when one has left, the others get three minutes to follow.
# shellcheck disable=SC2016
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 "${cores[@]}" --wait=180 \
    bash -c '
    launch=$1 many=$2; shift 2
    [[ $many -eq 0 ]] || set -- --host-rank "$SLURM_NODEID" "$@"
    exec "$launch" "$@"' nmt "$launch" "${#many[@]}" "${many[@]}" -- "$@" &
step=$!
[[ -z $heard ]] || kill -USR1 "$step" 2>/dev/null || true
while true; do
    code=0
    wait "$step" || code=$?
    kill -0 "$step" 2>/dev/null || break
done

state=unchanged said=''
if [[ $(status) != "$before" ]]; then
    state=$(field state)
    said=$(field exit_code)
fi
[[ ! $said =~ ^[0-9]+$ ]] || code=$said
case $state:$said in
    done:* | failed:* | *:130) is_wanted='' ;;  # finished, or will fail again, or a person stopped it
    preempted:* | running:*) is_wanted=yes ;;  # running: killed before it could say more
    *) is_wanted=$heard ;;  # it did not come so far; only where it was asked to stop is another try due
esac
[[ $state != unchanged || $code -ne 75 ]] || is_wanted=yes  # asked by Slurm, which signals tasks without this script
echo "slurm.sh: $folder is $state, code $code" >&2
[[ -n $is_wanted ]] || exit "$code"
if [[ ${SLURM_RESTART_COUNT:-0} -ge $max_requeues ]]; then
    echo "slurm.sh: requeued $SLURM_RESTART_COUNT times already; sbatch again, or raise NMT_MAX_REQUEUES" >&2
    exit "$code"
fi
# A job that was cancelled, or that Slurm requeues itself, is no longer RUNNING.
if scontrol show job "$job" | grep -q 'JobState=RUNNING'; then
    scontrol requeue "$job"
fi
exit "$code"
