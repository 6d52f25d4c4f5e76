#!/bin/sh
# Makes the pictures in this folder anew: some minutes of load on simulated workers, looked at by a real Prometheus and a real browser.
# `make.sh SECONDS` has it last so long in each mode. Best with a release build: WARMROUTE_BIN=target/release/warmroute.
set -eu
cd "$(dirname "$0")/../.."
for name in chromium prometheus redis-server; do
  command -v $name >/dev/null || { apt-get update -q && apt-get install -qy --no-install-recommends $name; }
done
[ -n "${WARMROUTE_BIN:-}" ] || cargo build --locked
exec python3 tests/lab/shots.py "$@"
