#!/usr/bin/env bash
# The Python of fla-core, mamba_ssm and causal_conv1d, whose kernels tests run on a CPU.
#
# It lies in .recurrent of the repository, outside of .venv; see tests/recurrent_python.py. Triton is
# brought too if PYTHON has none: builds of torch for the CPU come without it. PYTHON has pip; unset:
# .venv's.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
folder=$root/.recurrent
if [[ -d $folder/causal_conv1d ]]; then
    exit
fi
packages=(fla-core==0.6.0 einops==0.8.2)
if ! "$python" -c 'import triton' 2>/dev/null; then
    packages+=(triton==3.7.1)
fi
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder" \
    "${packages[@]}"
sources=$(mktemp -d)
trap 'rm -rf "$sources"' EXIT
# Their wheels need CUDA to be built; the sources are taken as they are. --no-build-isolation: their
# build would otherwise bring a torch.
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: \
    --no-build-isolation --dest "$sources" mamba_ssm==2.3.2.post1 causal_conv1d==1.7.0
for package in mamba_ssm causal_conv1d; do
    tar --extract --gzip --directory "$folder" --strip-components 1 \
        --file "$sources"/"$package"-*.tar.gz --wildcards "*/$package/*"
done
