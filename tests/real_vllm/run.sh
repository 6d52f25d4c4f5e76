#!/usr/bin/env bash
# The Service experiment on three real vLLM workers, in both modes: see README.md beside this file.
#
#   run.sh            everything, from nothing
#
# Variables (defaults): RIG_HOME (${TMPDIR:-/tmp}/warmroute-real-vllm): venv, model, logs, reports; PORT 8101: the first of three;
# WARMROUTE: the binary (built in debug if not given); SEEDS "1 2 3"; REQUESTS 240; KEEP=1: leave the workers running;
# RUNNING=1: workers run already on those ports.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export RIG_HOME=${RIG_HOME:-${TMPDIR:-/tmp}/warmroute-real-vllm} PORT=${PORT:-8101} WAIT=${WAIT:-600}
SEEDS=${SEEDS:-1 2 3} REQUESTS=${REQUESTS:-240}
PROXY=$((PORT + 10)) ADMIN=$((PORT + 11))
if [ -z "${WARMROUTE:-}" ]; then
  (cd "$HERE/../.." && nice cargo build --locked)
  WARMROUTE=$HERE/../../target/debug/warmroute
fi
mkdir -p "$RIG_HOME/run"
proxy=
finish() {
  if [ -n "$proxy" ]; then kill "$proxy" 2>/dev/null || true; fi
  if [ -z "${KEEP:-}${RUNNING:-}" ]; then "$HERE/workers.sh" stop; fi
}
trap finish EXIT

[ -n "${RUNNING:-}" ] || "$HERE/workers.sh" start 3
metrics=()
for i in 0 1 2; do metrics+=(--metrics "http://127.0.0.1:$((PORT + i))"); done
for seed in $SEEDS; do
  for mode in random kv; do
    # Every run starts from empty caches and a proxy that knows nothing.
    for i in 0 1 2; do curl -sf -o /dev/null -X POST "http://127.0.0.1:$((PORT + i))/reset_prefix_cache"; done
    {
      echo "listen: 127.0.0.1:$PROXY"
      echo "admin: 127.0.0.1:$ADMIN"
      echo "mode: $mode"
      echo "workers:"
      echo "  static:"
      for i in 0 1 2; do echo "    - url: http://127.0.0.1:$((PORT + i))"; done
    } > "$RIG_HOME/warmroute.yaml"
    "$WARMROUTE" serve --config "$RIG_HOME/warmroute.yaml" > "$RIG_HOME/run/warmroute-$mode$seed.log" 2>&1 &
    proxy=$!
    for _ in $(seq 60); do
      curl -sf -o /dev/null "http://127.0.0.1:$ADMIN/readyz" && break
      sleep 0.5
    done
    nice "$WARMROUTE" bench --target "$mode=http://127.0.0.1:$PROXY" "${metrics[@]}" \
      --prefixes 7 --concurrency 6 --requests "$REQUESTS" --runs 1 --seed "$seed" \
      --prefix-tokens 2000 --prompt-tokens 2300 --output-tokens 32 --json > "$RIG_HOME/run/$mode$seed.json"
    sleep 3 # One more reading of the workers' pages.
    curl -sf "http://127.0.0.1:$ADMIN/metrics" > "$RIG_HOME/run/$mode$seed.txt"
    kill "$proxy"
    wait "$proxy" || true
    proxy=
  done
done
# shellcheck disable=SC2086 # Seeds are words.
"${CHECK_PYTHON:-$RIG_HOME/venv/bin/python}" "$HERE/check.py" "$RIG_HOME/run" $SEEDS
