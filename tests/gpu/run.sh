#!/usr/bin/env bash
# Checks reads between two processes on one GPU, and measures them: what pack.sh has packed, on a machine with a GPU, without
# network and without Rust. With --memory host the same steps in host memory, which says nothing about GPUs.
# Ends within 8 minutes, with 0 if all is well. Results lie in the folder `results`, or where --out says.
set -uo pipefail

usage() {
    echo "usage: run.sh [--memory auto|host|cuda:N] [--quick] [--out FOLDER]" >&2
    exit 2
}

here=$(cd "$(dirname "$0")" && pwd)
memory=auto quick=() out=$here/results
while (($#)); do
    case $1 in
        --memory) memory=${2:?}; shift 2 ;;
        --quick) quick=(--quick); shift ;;
        --out) out=${2:?}; shift 2 ;;
        *) usage ;;
    esac
done
mkdir -p "$out"
kvx=$here/kvx
export KVX_NIXL_DIR=$here/nixl
unset KVX_NIXL_VERSION UCX_TLS UCX_LOG_FILE UCX_LOG_LEVEL

# Only what this machine lacks.
mkdir -p "$out/lacking"
for file in "$here"/extra/*; do
    [[ -e $file ]] || continue
    name=$(basename "$file")
    ldconfig -p 2>/dev/null | grep -qF "$name " || ln -sf "$file" "$out/lacking/$name"
done
export LD_LIBRARY_PATH=$out/lacking${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

failed=0
say() { echo "run: $*"; }
# step LIMIT NAME COMMAND...: bounded, and counted if it fails.
step() {
    local limit=$1 name=$2 begin=$SECONDS status=0
    shift 2
    timeout --kill-after=5 "$limit" "$@" || status=$?
    if ((status == 0)); then
        say "$name: passed in $((SECONDS - begin)) s"
    else
        say "$name: FAILED with status $status after $((SECONDS - begin)) s"
        failed=1
    fi
}

if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=index,name,memory.total,driver_version --format=csv | tee "$out/gpu.csv"
elif [[ $memory != host ]]; then
    say "no nvidia-smi here"
fi
# A report; its verdict is about other nodes, and no matter here.
timeout --kill-after=5 30 "$kvx" doctor --json >"$out/doctor.json" 2>"$out/doctor.log"
say "kvx doctor: status $?"

# Every byte, leases revoked during the read, order with streams, rates beside device-to-device copies.
step 250 "reads and rates" "$kvx" gpu-check --memory "$memory" "${quick[@]}" --timeout 240 --out "$out/gpu-check.json"

where=$(sed -n 's/^  "memory": "\(.*\)",$/\1/p' "$out/gpu-check.json" 2>/dev/null | head -1)
# UCX's own word for what carried the bytes: a short run more, because saying it costs time.
rm -f "$out"/ucx-*.log
UCX_PROTO_INFO=y UCX_LOG_LEVEL=info UCX_LOG_FILE=$out/ucx-%p.log \
    timeout --kill-after=5 60 "$kvx" gpu-check --memory "$memory" --quick --timeout 55 --out "$out/carried.json" \
    >/dev/null 2>"$out/carried.err"
# Of UCX's tables, those of reads from the other process: "into cuda/GPU0 from cuda: cuda_ipc/cuda". Threads write side by side;
# "[host:process:thread]" says who, with spaces after short numbers.
awk -F'|' '
    !match($1, /\[[^] ]*:[0-9]+ *:[0-9]+ *\]/) { next }
    { who = FILENAME substr($1, RSTART, RLENGTH) }
    NF == 3 { read[who] = sub(/.*remote memory read by ucp_get[^ ]* /, "", $2) ? $2 : ""; next }
    NF == 5 && read[who] != "" && $3 !~ /Description/ {
        line = read[who] ": " $4
        gsub(/ +/, " ", line)
        sub(/ $/, "", line)
        sub(/ :/, ":", line)
        print line
    }' "$out"/ucx-*.log 2>/dev/null | sort -u >"$out/carried.txt"
case $where in
    cuda:*) wanted='^into cuda[^ ]* .*from cuda.*: .*cuda_ipc' ;;
    *) wanted=': .*\(cma\|sysv\|posix\)' ;;
esac
if grep -q "$wanted" "$out/carried.txt"; then
    say "carried by:"
    sed 's/^/    /' "$out/carried.txt"
else
    say "carried by: FAILED: UCX does not speak of $wanted, see $out/carried.txt"
    failed=1
fi

sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1)
case $where in
    cuda:*)
        if [[ -n $sanitizer ]]; then
            step 120 "compute-sanitizer" "$sanitizer" --target-processes all --error-exitcode 9 \
                --log-file "$out/sanitizer-%p.log" "$kvx" gpu-check --memory "$memory" --quick --timeout 110
        else
            say "compute-sanitizer: skipped: it is not installed here"
        fi
        ;;
    *) say "compute-sanitizer: skipped: the blocks are in host memory" ;;
esac

if ((failed)); then
    say "not all is well; see $out"
    exit 1
fi
say "all is well on memory $where, in $SECONDS s"
