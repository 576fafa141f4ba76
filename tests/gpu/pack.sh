#!/usr/bin/env bash
# Packs what `run.sh` needs on a machine with a GPU, no network and no Rust: the stripped tool, the NIXL and UCX libraries
# that it loads, and the script itself. Needs readelf and strip (binutils), and python3 with pip for the CUDA runtime.
set -euo pipefail

usage() {
    echo "usage: pack.sh [--kvx PROGRAM] [--out FOLDER]
  --kvx PROGRAM  the tool to pack [default: target/release/kvx, built if it is not there]
  --out FOLDER   where to [default: target/gpu-pack]; what is there is replaced" >&2
    exit 2
}

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
kvx= out=$root/target/gpu-pack
while (($#)); do
    case $1 in
        --kvx) kvx=${2:?}; shift 2 ;;
        --out) out=${2:?}; shift 2 ;;
        *) usage ;;
    esac
done
if [[ -z $kvx ]]; then
    kvx=$root/target/release/kvx
    [[ -x $kvx ]] || (cd "$root" && cargo build --release --bin kvx)
fi

# The most that it may be, bytes.
readonly MOST=$((64 << 20))

library=$("$kvx" nixl-path)
from=$(dirname "$library")
wheel=$(dirname "$from")
package=$(basename "$from"); package=${package#.}; package=${package%.mesonpy.libs}
libs=$wheel/$package.libs
[[ -d $libs ]] || { echo "pack: $library is not in an unpacked wheel, such as pip makes" >&2; exit 1; }

rm -rf "$out"
to=$out/nixl/$(basename "$from")
mkdir -p "$to/plugins" "$out/nixl/$package.libs/ucx" "$out/extra"
cp "$kvx" "$out/kvx"
chmod u+w "$out/kvx"
strip "$out/kvx"
cp "$here/run.sh" "$out/run.sh"
# Says which version it is.
for info in "$wheel/$package"-*.dist-info; do mkdir -p "$out/nixl/$(basename "$info")"; done

needed() { readelf -d "$1" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p'; }

# What is opened by name; what that needs follows.
todo=("$from/libnixl_capi.so" "$from/plugins/libplugin_UCX.so")
for module in uct_cma uct_cuda ucm_cuda; do
    for file in "$libs/ucx/lib$module".*; do
        case $file in *.la) cp "$file" "$out/nixl/$package.libs/ucx/" ;; *) todo+=("$file") ;; esac
    done
done
declare -A seen=() outside=()
while ((${#todo[@]})); do
    file=${todo[-1]}
    unset 'todo[-1]'
    [[ -z ${seen[$file]:-} ]] || continue
    seen[$file]=1
    case $file in
        "$from/"*) cp -L "$file" "$to/${file#"$from/"}" ;;
        *) cp -L "$file" "$out/nixl/$package.libs/${file#"$libs/"}" ;;
    esac
    while read -r name; do
        if [[ -e $from/$name ]]; then todo+=("$from/$name")
        elif [[ -e $libs/$name ]]; then todo+=("$libs/$name")
        else outside[$name]=1
        fi
    done < <(needed "$file")
done

# What the machine may lack is taken along from this one, to be used only where it does.
for name in "${!outside[@]}"; do
    case $name in
        libssl.so.* | libcrypto.so.* | libz.so.*)
            found=$(ldconfig -p | awk -v name="$name" '$1 == name && /x86-64/ && !found++ { print $NF }')
            [[ -z $found ]] || cp -L "$found" "$out/extra/$name"
            ;;
        libcudart.so.*)
            # UCX notices freed GPU memory with its help, and does without.
            if python3 -m pip download --quiet --no-deps --dest "$out/cudart" "nvidia-cuda-runtime-cu${name##*.}" 2>/dev/null; then
                python3 - "$out/cudart" "$name" "$out/extra" <<'PYTHON'
import pathlib, sys, zipfile
folder, name, to = map(pathlib.Path, sys.argv[1:])
for wheel in folder.glob("*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if member.endswith(f"/{name}"):
                (to / name).write_bytes(archive.read(member))
PYTHON
            fi
            rm -rf "$out/cudart"
            [[ -e $out/extra/$name ]] || echo "pack: no $name; UCX will not notice GPU memory that is freed" >&2
            ;;
    esac
done

bytes=$(du -sb "$out" | cut -f1)
glibc=$(readelf -V "$out/kvx" "$to"/*.so | grep -o 'GLIBC_2\.[0-9]*' | sort -V | tail -1)
echo "pack: $out, $((bytes >> 20)) MiB; it needs ${glibc/_/ } or newer"
if ((bytes > MOST)); then
    echo "pack: that is more than the $((MOST >> 20)) MiB that may travel" >&2
    exit 1
fi
