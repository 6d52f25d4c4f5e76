#!/bin/sh
# curl against a base URL; same rules as openai_python.py. Prints status, type and body without ids, times and texts.
base=$1
model=$(curl -s "$base/v1/models" | grep -o '"id":"[^"]*"' | head -n 1 | cut -d '"' -f 4)
ask() {
    name=$1; shift
    echo "$name: $(curl -sS -w '\n[%{http_code} %{content_type}]' "$@" \
        | sed -E 's/"(id|created|content|text|request_id|system_fingerprint)":("[^"]*"|[0-9]+)/"\1":_/g; s/"cached_tokens":[0-9]+/"cached_tokens":_/g')"
}
json='content-type: application/json'
hello="\"model\":\"$model\",\"max_tokens\":3,\"messages\":[{\"role\":\"user\",\"content\":\"Hello\"}]"
ask chat "$base/v1/chat/completions" -H "$json" -d "{$hello}"
ask stream -N "$base/v1/chat/completions" -H "$json" -d "{$hello,\"stream\":true}"
ask 'stream with usage' -N "$base/v1/chat/completions" -H "$json" -d "{$hello,\"stream\":true,\"stream_options\":{\"include_usage\":true}}"
ask 'chunked upload' "$base/v1/chat/completions" -H "$json" -H 'transfer-encoding: chunked' -d "{$hello}"
ask 'expect' "$base/v1/chat/completions" -H "$json" -H 'expect: 100-continue' -d "{$hello}"
ask 'HTTP/1.0' -0 "$base/v1/models"
# Not asked here: HTTP/2 without TLS, which the proxy speaks and uvicorn does not.
ask form "$base/v1/chat/completions" -d "{$hello}"
ask 'broken JSON' "$base/v1/chat/completions" -H "$json" -d '{"messages": ['
ask 'empty body' "$base/v1/chat/completions" -H "$json" -X POST
ask 'GET on chat' "$base/v1/chat/completions"
ask 'unknown path' "$base/v1/nothing"
ask embeddings "$base/v1/embeddings" -H "$json" -d "{\"model\":\"$model\",\"input\":\"hello\"}"
ask tokenize "$base/tokenize" -H "$json" -d "{\"model\":\"$model\",\"prompt\":\"hello\"}"
ask head -I "$base/v1/models" -o /dev/null
ask health "$base/health"
ask version "$base/version"
