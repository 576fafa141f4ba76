#!/usr/bin/env bash
# Runs the tests of the code that is `unsafe` (memory: mappings, words, foreign ranges, pools) under
# valgrind's memcheck. Needs valgrind; says so and succeeds where there is none. Builds nothing twice:
# the ordinary test binary is what runs. Some minutes.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v valgrind >/dev/null; then
    echo "skipped: valgrind is not installed" >&2
    exit 0
fi
binary=$(timeout 900 cargo test -p kv-xfer --lib --no-run --message-format=json 2>/dev/null |
    python3 -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("executable") and message["target"]["kind"] == ["lib"]:
        print(message["executable"])')
# Tests start threads of their own; valgrind runs one at a time anyway.
timeout 900 valgrind --quiet --error-exitcode=9 --leak-check=full --show-leak-kinds=definite \
    --errors-for-leak-kinds=definite --fair-sched=yes \
    "$binary" --test-threads=1 "${@:-memory::}"
echo "valgrind: no errors"
