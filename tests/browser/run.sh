#!/bin/sh
# The status page in headless Chromium. Needs python3, and chromium, which it installs on Debian where it is missing.
set -eu
cd "$(dirname "$0")/../.."
command -v chromium >/dev/null || { apt-get update -q && apt-get install -qy --no-install-recommends chromium; }
[ -n "${WARMROUTE_BIN:-}" ] || cargo build --locked
exec python3 tests/browser/check.py
