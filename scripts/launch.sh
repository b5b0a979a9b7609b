#!/usr/bin/env bash
# nmt-train under torchrun, on one machine or on many. torchrun lets SIGUSR1 kill it, kills ranks that save for longer
# than 30 s, and turns every exit code into 1; this script hands each signal on once, waits until all is saved, and
# leaves with the code that the run itself wrote to status.json. It needs bash and the environment of nmt, no more.
set -euo pipefail

{  # read to the end before anything is done, so that an update of the checkout does not reach a run under way

usage() {
    cat <<'END'
usage: scripts/launch.sh [options] [--] NMT-TRAIN-ARGUMENTS

  --gpus N             processes on this machine (default: one per GPU, or 1 where there is none)
  --hosts N            machines in all (default: 1); start the same command on each, the main one first
  --host-rank K        which of them this is: 0 is the main one
  --main-host ADDR[:PORT]  where the others reach the main one (default port: 29400)
  --max-restarts N     how often ranks that died are started again (default: 3)
  --print-folder       print the run folder and leave

examples:
  scripts/launch.sh --config base.yaml
  scripts/launch.sh --gpus 4 --config base.yaml out=runs/four
  scripts/launch.sh --hosts 2 --host-rank 0 --main-host node1 -- --config big.yaml out=/shared/big data.store=/shared/wmt14     on node1
  scripts/launch.sh --hosts 2 --host-rank 1 --main-host node1 -- --config big.yaml out=/shared/big data.store=/shared/wmt14     on node2

SIGTERM, SIGUSR1 and SIGINT (Ctrl-C) save a checkpoint and end the run; the same command goes on from there.
Exit code: 0 done, 1 failed or killed, 2 a mistake in what was asked, 75 preempted, 130 interrupted.
END
}

refuse() {
    echo "launch.sh: error: $1; see scripts/launch.sh --help" >&2
    exit 2
}

count() {  # OPTION VALUE LEAST
    [[ $2 =~ ^(0|[1-9][0-9]{0,5})$ && $2 -ge $3 ]] || refuse "$1 ${2:-(nothing)}: give a whole number of at least $3"
}

gpus='' hosts=1 host_rank='' main_host='' max_restarts=3 print_folder=''
while [[ $# -gt 0 ]]; do
    case $1 in
        --gpus) count "$1" "${2-}" 1; gpus=$2; shift 2 ;;
        --hosts) count "$1" "${2-}" 1; hosts=$2; shift 2 ;;
        --host-rank) count "$1" "${2-}" 0; host_rank=$2; shift 2 ;;
        --main-host) [[ -n ${2-} ]] || refuse "--main-host: give an address"; main_host=$2; shift 2 ;;
        --max-restarts) count "$1" "${2-}" 0; max_restarts=$2; shift 2 ;;
        --print-folder) print_folder=yes; shift ;;
        -h | --help) usage; exit 0 ;;
        --) shift; break ;;
        *) break ;;
    esac
done
[[ $# -gt 0 ]] || refuse "nothing to train: give the arguments of nmt-train, such as --config base.yaml"
if [[ $hosts -gt 1 ]]; then
    [[ -n $host_rank && $host_rank -lt $hosts ]] || refuse "--hosts $hosts needs --host-rank 0 to $((hosts - 1))"
    [[ -n $main_host ]] || refuse "--hosts $hosts needs --main-host ADDR, the machine with --host-rank 0"
elif [[ -n $host_rank$main_host ]]; then
    refuse "--host-rank and --main-host need --hosts N"
fi

# The environment that is active, else the checkout's own; torchrun must be the one that belongs to nmt-train.
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
PATH=$PATH:$here/.venv/bin
program=$(command -v nmt-train) || refuse "nmt-train is not installed; run make install in $here"
PATH=$(dirname -- "$program"):$PATH

# Asked once before torchrun: a mistake in the arguments is reported in one line, with exit code 2.
config=$(nmt-train "$@" --print-config)
if [[ $config != name:* ]]; then  # of nmt-train --help
    printf '%s\n' "$config"
    exit 0
fi
folder=$(python3 -c 'import sys, yaml; c = yaml.safe_load(sys.stdin); print(c["out"] or "runs/" + c["name"])' \
    <<<"$config")
if [[ -n $print_folder ]]; then
    printf '%s\n' "$folder"
    exit 0
fi

status() {  # the text of status.json, or nothing
    cat -- "$folder/status.json" 2>/dev/null || true
}

field() {  # NAME: what status.json says about it, or nothing
    sed -nE "s/.*\"$1\": *\"?([a-z0-9]+).*/\1/p" <<<"$(status)"
}

options=("--max-restarts=$max_restarts" --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1)
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}  # older torchruns lack the option for it
# When torchrun 2.13 shares its store, a host that joins a second time gets no address, and restarted
# ranks may read what their predecessors left there; both wait forever.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
if [[ $hosts -eq 1 ]]; then
    options+=(--standalone)
else
    [[ $main_host == *:* ]] || main_host=$main_host:29400
    # Which of our addresses the main host sees: host names often resolve to 127.0.1.1, which no other host can reach.
    address=$(python3 -c 'import socket, sys
host, _, port = sys.argv[1].rpartition(":")
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
    route.connect((host, int(port)))
    print(route.getsockname()[0])' "$main_host" 2>/dev/null) || refuse "--main-host $main_host: no way to it from here"
    # A lost cable stops the calls of torchrun to the store; after the usual 60 s it would give up what TCP still mends.
    is_host=false
    [[ $host_rank -ne 0 ]] || is_host=true
    options+=("--nnodes=$hosts" --rdzv-backend=c10d "--rdzv-endpoint=$main_host"
        "--rdzv-conf=is_host=$is_host,read_timeout=300"
        "--rdzv-id=nmt-$(cksum <<<"${SLURM_JOB_ID-} $folder" | cut -d ' ' -f 1)" "--local-addr=$address")
    # Ranks without a GPU talk through gloo, which takes the interface of the host name by default.
    PATH=$PATH:/usr/sbin:/sbin
    if [[ -z ${GLOO_SOCKET_IFNAME-} ]] && found=$(ip -o -4 address show to "$address" 2>/dev/null); then
        read -r _ GLOO_SOCKET_IFNAME _ <<<"$found"
        export GLOO_SOCKET_IFNAME
    fi
fi

if [[ -z $gpus ]]; then
    # A GPU that torch cannot use is reported here, in one line and with exit code 2, which torchrun would turn into 1.
    gpus=$(python3 -c 'import sys
from nmt.commands.cli import run_command

def count_gpus():
    import torch
    from nmt.system.device import choose_device

    is_gpu = choose_device(sys.argv[1]).type == "cuda"
    print(torch.cuda.device_count() if is_gpu else 1)
    return 0

sys.exit(run_command(count_gpus, "launch.sh"))' "$(sed -nE 's/^device: *//p' <<<"$config")")
fi
options+=("--nproc-per-node=$gpus")

# In a process group of its own (set -m), so that Ctrl-C comes through this script alone, once: a second signal while
# torchrun hands on the first would cut the saving short. And torchrun must not outlive this script, however it dies.
tied=()
! command -v setpriv >/dev/null || tied=(setpriv --pdeathsig TERM)
child='' heard=''
hear() {
    [[ -z $heard ]] || return 0
    heard=$1
    echo "launch.sh: SIG$1; the run saves and ends" >&2
    [[ -z $child ]] || kill -s "$1" "$child" 2>/dev/null || true
}
for name in TERM INT USR1 HUP; do
    # shellcheck disable=SC2064  # the name of now
    trap "hear $name" "$name"
done

before=$(status)
starts=0
while true; do
    set -m
    "${tied[@]}" torchrun "${options[@]}" -m nmt.commands.train "$@" </dev/null &
    child=$!
    set +m
    [[ -z $heard ]] || kill -s "$heard" "$child" 2>/dev/null || true  # it came before there was a child
    while true; do
        code=0
        wait "$child" || code=$?
        kill -0 "$child" 2>/dev/null || break  # else a signal ended the wait, not torchrun
    done
    child=''
    # Where torchrun was killed its ranks still save, and so may rank 0 on another host, which holds .lock until then.
    if [[ $code -ne 0 && $(status) != "$before" && $(field state) == running ]] && command -v flock >/dev/null; then
        flock --wait 120 "$folder/.lock" true || echo "launch.sh: someone still holds $folder/.lock" >&2
    fi
    said=''
    if [[ $(status) != "$before" ]]; then  # else it tells of an earlier run: this one did not come so far
        said=$(field exit_code)
    fi
    # A host that loses the main one loses its torchrun too. The main one waits ten minutes for it, so it comes back.
    [[ ${host_rank:-0} -gt 0 && -z $heard && $code -ne 0 && ! $said =~ ^(0|2|130)$ ]] || break
    [[ $starts -lt $max_restarts ]] || break
    starts=$((starts + 1))
    echo "launch.sh: torchrun ended with $code; joining again ($starts of $max_restarts)" >&2
done
[[ ! $said =~ ^[0-9]+$ ]] || exit "$said"
if [[ -n $said ]]; then
    echo "launch.sh: the run was killed; the same command continues it from its last checkpoint" >&2
    exit 1
fi
case $heard in
    '') exit "$code" ;;
    INT) exit 130 ;;
    *) exit 75 ;;
esac

}
