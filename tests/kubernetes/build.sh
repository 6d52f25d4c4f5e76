#!/usr/bin/env bash
# Builds kube-apiserver, kubectl and helm once, and fetches etcd and promtool from Debian without installing them (their packages would
# start services). Prints the folder. Needs Go and Debian's package tools; the first time takes some minutes, later ones none.
# With `checks`, only helm and promtool: what deploy/check wants.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
bin=${WARMROUTE_KUBERNETES_BIN:-$here/../../target/kubernetes/bin}
mkdir -p "$bin" && bin=$(cd "$bin" && pwd)

which=${1:-all}
packages="helm.sh/helm/v3/cmd/helm"
[ "$which" = checks ] || packages="$packages k8s.io/kubernetes/cmd/kube-apiserver k8s.io/kubernetes/cmd/kubectl"
stamp=$(cat "$here/programs/go.mod" "$here/programs/go.sum" "$here/build.sh" | sha256sum)
if [ "$(cat "$bin/stamp" 2>/dev/null)" != "$stamp" ] && [ "$(cat "$bin/stamp.$which" 2>/dev/null)" != "$stamp" ]; then
  command -v go > /dev/null || { echo "go is not on PATH: install Go 1.26 or later" >&2; exit 1; }
  version=$(sed -n 's/^\tk8s.io\/kubernetes v\([0-9.]*\).*/\1/p' "$here/programs/go.mod")
  base=k8s.io/component-base/version
  minor=$(echo "$version" | cut -d. -f2)
  echo "building $packages at $version: some minutes, once" >&2
  # shellcheck disable=SC2086 # the packages are words
  (cd "$here/programs" && go build -trimpath -o "$bin/" \
    -ldflags "-s -w -X $base.gitVersion=v$version -X $base.gitMajor=1 -X $base.gitMinor=$minor" $packages) >&2
  if [ "$which" = checks ]; then echo "$stamp" > "$bin/stamp.checks"; else echo "$stamp" > "$bin/stamp"; fi
fi

# A program out of a Debian package, unless it is there.
from_debian() {
  local program=$1 package=$2 folder
  [ ! -x "$bin/$program" ] || return 0
  folder=$(mktemp -d)
  (cd "$folder" && { apt-get download -q "$package" || { apt-get update -q && apt-get download -q "$package"; }; } \
    && dpkg-deb -x ./"$package"_*.deb tree && cp "tree/usr/bin/$program" "$bin/") >&2
  rm -rf "$folder"
}
from_debian promtool prometheus
[ "$which" = checks ] || from_debian etcd etcd-server

echo "$bin"
