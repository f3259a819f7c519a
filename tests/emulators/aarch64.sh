#!/usr/bin/env bash
# The dot products of Arm processors, run by QEMU: each tier's check, and with "all" its whole step beside plain vectors.
# usage: tests/emulators/aarch64.sh [all]        Debian: apt-get install qemu-user debootstrap unzip; as root; 1.5 GB
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=${FOLDER:-/tmp/labkit-aarch64}
mkdir -p "$folder/site" "$folder/wheels"

if [ ! -x "$folder/debian/usr/bin/python3.11" ]; then
  debootstrap --arch=arm64 --variant=minbase --foreign --include=python3.11,libgomp1 bookworm "$folder/debian"
  for package in "$folder"/debian/var/cache/apt/archives/*.deb; do dpkg-deb -x "$package" "$folder/debian"; done
fi

if [ ! -d "$folder/site/numba" ]; then
  platforms=$(for glibc in 17 27 28; do echo "--platform manylinux_2_${glibc}_aarch64"; done)
  # torch 2.8: the package index's wheel of 2.13 asks for a GPU's libraries
  # shellcheck disable=SC2086
  python -m pip download -q --only-binary=:all: --python-version 3.11 --implementation cp $platforms \
    --platform manylinux2014_aarch64 -d "$folder/wheels" numba torch==2.8.0 psutil safetensors filelock
  for wheel in "$folder"/wheels/*.whl; do unzip -qo "$wheel" -d "$folder/site"; done
fi

cat > "$folder/python" <<END  # Python starts itself again under this name
#!/bin/sh
exec qemu-aarch64 -cpu max -L "$folder/debian" -0 "$folder/python" "$folder/debian/usr/bin/python3.11" "\$@"
END
chmod +x "$folder/python"
export PYTHONPATH="$root:$folder/site" LABKIT_CACHE="$folder/cache" PYTHONDONTWRITEBYTECODE=1
cd "$root"
"$folder/python" -c "from labkit.kernels.cpu import tiers; print([tier.name for tier in tiers.available()])"
for tier in i8mm dotprod; do
  "$folder/python" -m labkit.kernels.cpu.tier_check "$tier"
  echo "$tier: its products are exact"
done
[ "${1:-}" = all ] || exit 0
for tier in i8mm dotprod plain; do # each is compiled first, by an emulated compiler
  LABKIT_CPU=$tier "$folder/python" -m tests.emulators.digests | grep -v "^#" > "$folder/$tier"
  wc -l < "$folder/$tier"
done
cmp "$folder/i8mm" "$folder/plain"
cmp "$folder/dotprod" "$folder/plain"
echo "the same bits on every tier"
