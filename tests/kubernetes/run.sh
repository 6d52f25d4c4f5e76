#!/usr/bin/env bash
# The tests of `tests/cluster` against a real kube-apiserver with etcd and RBAC: one command, and nothing is left running.
set -euo pipefail
cd "$(dirname "$0")/../.."
WARMROUTE_KUBERNETES_BIN=$(tests/kubernetes/build.sh)
export WARMROUTE_KUBERNETES_BIN PATH="$PATH:$WARMROUTE_KUBERNETES_BIN"

cargo test --locked --no-run --test cluster

# Kubernetes takes no loopback address for a pod's. So all of it runs in a network namespace of its own, in which 10.77.0.0/16 is this
# machine and nothing else is anywhere; and in a process namespace, which takes along whatever it has started. One test at a time: some stop
# the API server.
inside='ip link set lo up && ip route add local 10.77.0.0/16 dev lo && "$@"'
[ "$(id -u)" = 0 ] && own=() || own=(--map-root-user)
unshare --net --pid --fork --kill-child --mount-proc "${own[@]}" sh -c "$inside" sh \
  cargo test --locked --offline --test cluster -- --nocapture --test-threads=1 "$@"
