#!/bin/sh
# The board and the alerts with Debian's prometheus: rules in made-up time, then everything against a real server that reads a real
# warmroute. Two minutes. Needs python3; installs prometheus where it is missing.
set -eu
cd "$(dirname "$0")/../.."
command -v promtool >/dev/null || { apt-get update -q && apt-get install -qy --no-install-recommends prometheus; }
[ -n "${WARMROUTE_BIN:-}" ] || cargo build --locked
promtool check rules deploy/prometheus/rules.yaml
promtool test rules tests/prometheus/alerts.yaml
exec python3 tests/prometheus/check.py
