#!/usr/bin/env bash
# The proof on a machine with a GPU and without a network, in stages that fail one by one. What scripts/gpu_pack wrote comes
# along in .gpu/, all pieces at once or one a call:
#
#   benchmarks/gpu/run.sh keep N            moves piece N to where `install` finds it
#   benchmarks/gpu/run.sh install STAGE...  joins and unpacks all pieces, then runs the stages in this order
#   benchmarks/gpu/run.sh STAGE...          when they have been unpacked
#
# Stages: environment, checks (of the decode step), steps-1B, steps-8B (decode steps beside vLLM's), parallel (two GPUs), probe,
# wire-8B, wire-1B, wire-host (the handoff's bytes), handoff-1B-NHD, handoff-1B-HND, handoff-8B-NHD, handoff-8B-HND (vLLM to
# engine, element by element).
# Everything printed goes to $OUT/log too; figures and the other processes' logs to $OUT/out.tar.gz, written anew after each
# stage. The exit status counts the stages that failed.
set -uo pipefail
cd "$(dirname "$0")/../.."
pieces=${PIECES:-/tmp/pieces}; root=${ROOT:-/tmp/anchorleg}; told=${OUT:-$root}; out=$root/out
mkdir -p "$pieces" "$root" "$out"
if [ "${1:-}" = keep ]; then
    cp ".gpu/$2" "$pieces/$2.part" && mv "$pieces/$2.part" "$pieces/$2" && ls -l "$pieces"
    exit
fi
exec > >(tee -a "$told/log") 2>&1

vllm_path=${VLLM_PATH-$root/site:$root/extra}
export PYTHONPATH=${OWN_PATH-$root/extra} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_WORKER_MULTIPROCESSING_METHOD=spawn
failed=0

# UCX's part for CUDA looks for the runtime that torch brings.
runtime=$(python3 -c 'import os, torch; print(os.path.join(os.path.dirname(os.path.dirname(torch.__file__)), "nvidia/cu13/lib"))')
export LD_LIBRARY_PATH=$runtime${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

stage() { # name, seconds, command...: run within the time and say how it went
    local name=$1 limit=$2 begin=$SECONDS status=0
    shift 2
    echo "=== $name (at most $limit s)"
    # Interrupted, a program ends what it started, too.
    timeout --signal=INT --kill-after=25 "$limit" "$@" || status=$?
    echo "=== $name: $([ $status = 0 ] && echo done || echo "FAILED with status $status") after $((SECONDS - begin)) s"
    [ $status = 0 ] || failed=$((failed + 1))
    tar cz -C "$root" -f "$told/out.tar.gz" out
}

install() {
    cat "$pieces"/? > "$root/all" || return
    local extra
    extra=$((10#$(head -c 16 "$root/all")))
    tail -c +17 "$root/all" | head -c "$extra" | tar xJ -C "$root" || return
    tail -c +$((17 + extra)) "$root/all" | xz -dc -T0 | tar x -C "$root" || return
    rm "$root/all"
    du -sh "$root"/*
}

environment() {
    nvidia-smi --query-gpu=name,driver_version,memory.used --format=csv,noheader
    PYTHONPATH=$vllm_path python3 - <<'END'
import torch, triton, vllm
from handoff.nixl import _nixl_api
import decode_daemon.runner, decode_daemon.receiver, connector.sender
print("torch", torch.__version__, "triton", triton.__version__, "vLLM", vllm.__version__, "NIXL", _nixl_api().__name__)
END
}

steps() { # model
    python3 -m benchmarks.gpu --only ceilings steps vllm --models "$1" --vllm-site "$root/site" --json "$out/steps-$1.json"
}

wire() { # name, options...
    python3 -m benchmarks.gpu.wire --device "${DEVICE:-cuda}" --vllm-path "$vllm_path" --log "$out/sender-$1.log" \
        --json "$out/wire-$1.json" "${@:2}"
}

probe() { # which way UCX takes, both ends' word
    local status=0
    UCX_PROTO_INFO=y wire probe --model 1B --prompts 128 --rounds 1 > "$out/probe.log" 2>&1 || status=$?
    grep -vE '^\[[0-9.]+\] ' "$out/probe.log" | tail -8
    grep -hA6 'remote memory write' "$out/sender-probe.log" | sed 's/^[^|]*//' | grep -E 'write|copy' | sort | uniq -c
    return $status
}

handoff() { # name, options...
    python3 -m benchmarks.gpu.handoff --device "${DEVICE:-cuda}" --vllm-path "$vllm_path" --log "$out/vllm-$1.log" \
        --json "$out/handoff-$1.json" "${@:2}"
}

export -f install environment steps wire probe handoff
export pieces root out vllm_path

for wanted in "$@"; do
    case $wanted in
        install) stage install 90 bash -c install; [ "$failed" = 0 ] || break ;;
        environment) stage environment 60 bash -c environment ;;
        checks) stage checks 180 python3 -m benchmarks.gpu --only checks ;;
        parallel) stage parallel 200 python3 -m benchmarks.gpu.parallel --gpus 2 --models 8B --json "$out/parallel.json" ;;
        steps-*) stage "$wanted" 160 bash -c "steps ${wanted#*-}" ;;
        probe) stage probe 60 bash -c probe ;;
        wire-host) stage "$wanted" 90 bash -c 'wire host --model 8B --land-on-host' ;;
        wire-*) stage "$wanted" 60 bash -c "wire ${wanted#*-} --model ${wanted#*-}" ;;
        handoff-1B-NHD) stage "$wanted" 140 bash -c 'handoff 1B-NHD --model 1B --layout NHD' ;;
        handoff-1B-HND) stage "$wanted" 140 bash -c 'handoff 1B-HND --model 1B --layout HND --chunk 512' ;;
        handoff-8B-NHD) stage "$wanted" 140 bash -c 'handoff 8B-NHD --model 8B-4 --layout NHD --chunk 2048' ;;
        handoff-8B-HND) stage "$wanted" 140 bash -c 'handoff 8B-HND --model 8B-4 --layout HND' ;;
        handoff-tiny) # on a machine without a GPU: DEVICE=cpu
            stage "$wanted" 200 bash -c 'handoff tiny --model tiny --dtype float32 --chunk 256 --block 32 --prompts 1 31 33 1000'
            ;;
        *) echo "no stage $wanted"; failed=$((failed + 1)) ;;
    esac
done
echo "=== $failed stages failed"
exit "$failed"
