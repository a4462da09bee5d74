#!/usr/bin/env bash
# Makes a tarball and, if dpkg-deb is installed, a .deb from an existing binary, and a file with its debug information.
#
#   scripts/package.sh BINARY OUT_DIR
#
# PACKAGE_LEVEL: compression level, 9 by default.
# The same binary and commit give the same bytes: times are the commit's, owners are root, names are sorted.
set -euo pipefail
umask 022

if [ $# -ne 2 ]; then
    echo "usage: $0 BINARY OUT_DIR (\`make package\` builds the binary too)" >&2
    exit 2
fi
binary=$(realpath "$1")
mkdir -p "$2"
out=$(realpath "$2")
cd "$(dirname "$0")/.."

version=$("$binary" --version | cut -d ' ' -f 2)
machine=$(uname -m)
if [ -z "${SOURCE_DATE_EPOCH-}" ]; then
    SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || date +%s)
fi
export SOURCE_DATE_EPOCH

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Copies the documents of both packages.
documents() {
    mkdir -p "$1"
    cp -R ./*.md LICENSE docs "$1"
}

# Debug information and function names are most of the size. The binary names the file that has them: debuggers, and the
# backtraces of a panic, find it in /usr/lib/debug.
name=switchyard-$version-linux-$machine
objcopy --only-keep-debug --compress-debug-sections=zlib "$binary" "$out/$name.debug"
chmod 644 "$out/$name.debug"
strip -o "$work/switchyard" "$binary"
objcopy --add-gnu-debuglink="$out/$name.debug" "$work/switchyard"
install -D -m 755 "$work/switchyard" "$work/$name/switchyard"
documents "$work/$name"
cp packaging/switchyard.service packaging/sysusers.conf packaging/switchyard.toml "$work/$name"
tar --directory "$work" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" -cf - "$name" |
    gzip -n "-${PACKAGE_LEVEL-9}" >"$out/$name.tar.gz"
made=("$name.tar.gz" "$name.debug")

if command -v dpkg-deb >/dev/null; then
    case $machine in
    x86_64) architecture=amd64 ;;
    aarch64) architecture=arm64 ;;
    *) architecture=$(dpkg --print-architecture) ;;
    esac
    root=$work/deb
    install -D -m 755 "$work/switchyard" "$root/usr/bin/switchyard"
    install -D -m 644 packaging/switchyard.service "$root/usr/lib/systemd/system/switchyard.service"
    install -D -m 644 packaging/sysusers.conf "$root/usr/lib/sysusers.d/switchyard.conf"
    install -D -m 644 packaging/switchyard.toml "$root/etc/switchyard.toml"
    install -d -m 750 "$root/etc/switchyard"
    documents "$root/usr/share/doc/switchyard"
    mv "$root/usr/share/doc/switchyard/LICENSE" "$root/usr/share/doc/switchyard/copyright"
    mkdir "$root/DEBIAN"
    install -m 755 packaging/deb/* "$root/DEBIAN"
    echo /etc/switchyard.toml >"$root/DEBIAN/conffiles"
    cat >"$root/DEBIAN/control" <<CONTROL
Package: switchyard
Version: $version
Architecture: $architecture
Maintainer: The developers of Switchyard
Homepage: $(sed -n 's/^repository = "\(.*\)"$/\1/p' Cargo.toml)
Installed-Size: $(du -k -s --apparent-size "$root" | cut -f 1)
Section: database
Priority: optional
Depends: systemd
Suggests: redis-tools
Description: software switch for Redis and Valkey
 One address that ordinary Redis clients talk to, in front of ordinary Redis
 and Valkey servers. Slots and keys move between the servers while they are used.
CONTROL
    (cd "$root" && find . -type f ! -path './DEBIAN/*' -printf '%P\0' | sort -z | xargs -0 md5sum >DEBIAN/md5sums)
    deb=switchyard_${version}_$architecture.deb
    dpkg-deb --root-owner-group -Zxz "-z${PACKAGE_LEVEL-9}" --build "$root" "$out/$deb" >/dev/null
    made+=("$deb")
else
    echo "no .deb: dpkg-deb is not here" >&2
fi

(cd "$out" && sha256sum "${made[@]}" >"switchyard-$version-SHA256SUMS")
printf '%s\n' "${made[@]/#/$out/}"
