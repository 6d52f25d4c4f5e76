#!/bin/sh
# The board and the alerts with Debian's prometheus: rules in made-up time, then everything against a real server that reads a real
# warmroute. Two minutes. Needs python3; installs prometheus and redis-server where they are missing.
set -eu
cd "$(dirname "$0")/../.."
for program in prometheus redis-server; do
  command -v $program >/dev/null || { apt-get update -q && apt-get install -qy --no-install-recommends $program; }
done
[ -n "${WARMROUTE_BIN:-}" ] || cargo build --locked
promtool check rules deploy/prometheus/rules.yaml
promtool test rules tests/prometheus/alerts.yaml
exec python3 tests/prometheus/check.py
