#!/usr/bin/env bash
# Regenerates src/bindings.rs from include/nixl_capi.h.
#
#   scripts/regenerate-bindings.sh           write src/bindings.rs
#   scripts/regenerate-bindings.sh --check   fail when src/bindings.rs would change (for CI)
#
# Needs libclang with its resource headers. On Debian and Ubuntu it is installed when missing.
set -euo pipefail
cd "$(dirname "$0")/../.."

have_libclang() {
    [ -n "${LIBCLANG_PATH:-}" ] && return 0
    compgen -G '/usr/lib/llvm-*/lib/libclang*.so*' | grep -qv -- '-cpp' && return 0
    ldconfig -p 2>/dev/null | grep -q 'libclang[-.0-9]*\.so' && return 0
    return 1
}

if ! have_libclang; then
    if command -v apt-get >/dev/null; then
        echo "libclang not found: installing libclang-dev" >&2
        if [ "$(id -u)" = 0 ]; then
            apt-get update -qq && apt-get install -y -qq libclang-dev
        else
            sudo apt-get update -qq && sudo apt-get install -y -qq libclang-dev
        fi
    else
        echo "error: libclang not found: install it, or set LIBCLANG_PATH to the folder that has libclang.so" >&2
        exit 1
    fi
fi

exec cargo run --quiet --package nixl-sys --features bindgen --bin regenerate-bindings -- "$@"
