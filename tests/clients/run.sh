#!/bin/sh
# Real client libraries against a base URL, such as http://127.0.0.1:8080 (a proxy, or an engine behind it):
#   run.sh URL            prints what the clients see
#   run.sh URL ENGINE     the same at both, and what differs; fails where anything does
# Needs python3 and npm. What it installs goes to a temporary directory; CLIENTS_DIR=... keeps one between runs.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
if [ -n "${CLIENTS_DIR:-}" ]; then
    dir=$CLIENTS_DIR; mkdir -p "$dir"
else
    dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
fi
[ -x "$dir/venv/bin/python" ] || {
    python3 -m venv "$dir/venv"
    "$dir/venv/bin/pip" install -q --disable-pip-version-check openai langchain-openai
}
[ -d "$dir/node_modules/openai" ] || (cd "$dir" && npm install --silent --no-fund --no-audit --prefix "$dir" openai >/dev/null)
cp "$here/openai_node.mjs" "$dir"
all() {
    echo '# openai for Python';  "$dir/venv/bin/python" "$here/openai_python.py" "$1" 2>&1 || echo "FAILED: $?"
    echo '# openai for Node';    node "$dir/openai_node.mjs" "$1" 2>&1 || echo "FAILED: $?"
    echo '# LangChain';          "$dir/venv/bin/python" "$here/langchain_openai_chat.py" "$1" 2>&1 || echo "FAILED: $?"
    echo '# curl';               sh "$here/curl.sh" "$1" 2>&1 || echo "FAILED: $?"
}
if [ $# -eq 1 ]; then all "$1"; exit; fi
all "$2" >"$dir/direct.txt"
all "$1" >"$dir/proxy.txt"
diff "$dir/direct.txt" "$dir/proxy.txt" && echo "no difference in $(wc -l <"$dir/proxy.txt") lines"
