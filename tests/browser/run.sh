#!/bin/sh
# The status page in headless Chromium. Needs python3; installs chromium and redis-server, on Debian, where they are missing.
set -eu
cd "$(dirname "$0")/../.."
for program in chromium redis-server; do
  command -v $program >/dev/null || { apt-get update -q && apt-get install -qy --no-install-recommends $program; }
done
[ -n "${WARMROUTE_BIN:-}" ] || cargo build --locked
exec python3 tests/browser/check.py
