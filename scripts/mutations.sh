#!/usr/bin/env bash
# Removes, one after the other, the code that enforces each guarantee, and shows that a test notices.
#
#   scripts/mutations.sh            all mutations
#   scripts/mutations.sh 2a 8       those whose names begin like this
#
# Works on a copy of the sources under target/mutations; the tree itself is not touched. Each
# tests/mutations/NAME.patch says in its head which guarantee it breaks ("guarantee:"), what it
# removes ("removes:") and which test must fail ("test:", arguments of cargo test -p kv-xfer).
# Exits non-zero when a mutation is not noticed, or does not apply or compile any more.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
copy=$root/target/mutations/src
seeds=${KVX_WORLD_SEEDS:-10000}
mkdir -p "$copy"
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$root/target} KVX_WORLD_SEEDS=$seeds
# Unoptimised: it is built once for each mutation and run for seconds. What it depends on is shared
# with ordinary builds.
profile=(--config 'profile.dev.package.kv-xfer.opt-level=0'
    --config 'profile.dev.package.kv-xfer.debug="none"')

field() { sed -n "s/^$2: //p" "$1" | head -1; }

fresh() {
    # Only what differs is copied, so that cargo builds only what a patch touched.
    local file
    while IFS= read -r -d '' file; do
        [[ -f $file ]] || continue
        if ! cmp -s "$file" "$copy/$file"; then
            mkdir -p "$copy/$(dirname "$file")"
            cp "$file" "$copy/$file"
        fi
    done < <(git ls-files -z --cached --others --exclude-standard)
}

missed=0
printf '%-36s %-10s %s\n' mutation noticed by
for patch in tests/mutations/*.patch; do
    name=$(basename "$patch" .patch)
    if (($# > 0)); then
        wanted=0
        for prefix in "$@"; do [[ $name == "$prefix"* ]] && wanted=1; done
        ((wanted)) || continue
    fi
    fresh
    log=$root/target/mutations/$name.log
    if ! patch -s -p1 -d "$copy" <"$patch" >"$log" 2>&1; then
        printf '%-36s %-10s %s\n' "$name" "NO" "the patch does not apply, see $log"
        missed=1
        continue
    fi
    read -ra arguments <<<"$(field "$patch" test)"
    if ! (cd "$copy" && timeout 1800 cargo test -q "${profile[@]}" -p kv-xfer "${arguments[@]}" --no-run) >>"$log" 2>&1; then
        printf '%-36s %-10s %s\n' "$name" "NO" "it does not compile, see $log"
        missed=1
        continue
    fi
    if (cd "$copy" && timeout 900 cargo test -q "${profile[@]}" -p kv-xfer "${arguments[@]}") >>"$log" 2>&1; then
        printf '%-36s %-10s %s\n' "$name" "NO" "${arguments[*]} passes without it"
        missed=1
    else
        # A test's own words, or the rule that the world saw broken.
        rule=$(grep -oE 'rule: [A-Z][A-Za-z]+' "$log" | head -1 | cut -c7- || true)
        failed=$(grep -oE "^test [a-z_:0-9]+ \.\.\. FAILED|^    [a-z_:0-9]+$|thread '[a-z_:0-9]+'" "$log" |
            grep -oE '[a-z_0-9]+(::[a-z_0-9]+)*' | grep -vxE 'test|thread|FAILED' | head -1 || true)
        printf '%-36s %-10s %s\n' "$name" yes "${arguments[*]}: ${failed}${rule:+ ($rule)}"
    fi
done
fresh
exit "$missed"
