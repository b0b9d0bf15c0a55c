#!/usr/bin/env bash
# Sets this checkout up: programs, the Python environment in .venv, the jars of the local stack.
# Every step is skipped when it was done before; a broken-off run goes on where it stopped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '\033[1m[setup %s]\033[0m %s\n' "$1" "$2" >&2; }
fail() { printf 'rollwire: %s\n' "$1" >&2; exit 2; }

# 1. Checks, before anything is downloaded.
python=""
for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
  if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$candidate
    break
  fi
done
[ -n "$python" ] || fail "Python 3.11 or later is missing: install it (for example with your system's package manager), then try again"
[ -L src/rollwire/ops ] || fail "src/rollwire/ops is no link: check out again with 'git config core.symlinks true'"
say 1/4 "programs: a JDK 17+, Maven, redis-server; Chromium for tests"
PYTHONPATH=src "$python" -P -m rollwire.ops.programs

# 2. uv: the one on the PATH, else one of our own.
if command -v uv >/dev/null && uv --version >/dev/null 2>&1; then
  uv=uv
else
  uv=.rollwire/tools/bin/uv
  if ! "$uv" --version >/dev/null 2>&1; then
    say 2/4 "uv, the installer, into .rollwire/tools"
    rm -rf .rollwire/tools && mkdir -p .rollwire
    if ! "$python" -m venv .rollwire/tools 2>.rollwire/venv-error; then
      rm -f .rollwire/venv-error
      # Debian and Ubuntu ship venv apart from Python.
      version=$("$python" -c 'import sys; print(f"python3.{sys.version_info[1]}-venv")')
      if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        DEBIAN_FRONTEND=noninteractive apt-get -q update >&2
        DEBIAN_FRONTEND=noninteractive apt-get -q -y install --no-install-recommends "$version" >&2
        rm -rf .rollwire/tools
        "$python" -m venv .rollwire/tools
      else
        fail "$python cannot make a virtual environment: 'sudo apt-get install -y $version' (or the like), or install uv, then try again"
      fi
    fi
    rm -f .rollwire/venv-error
    .rollwire/tools/bin/python -m pip install --quiet --disable-pip-version-check uv
  fi
fi

# 3. The Python environment; its stamp is the digest of what it was made from.
stamp=.venv/.rollwire-stamp
wanted=$(cat pyproject.toml constraints.txt | "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
if [ "$(cat "$stamp" 2>/dev/null || true)" = "$wanted" ]; then
  say 3/4 "the Python environment is up to date"
else
  say 3/4 "the Python environment into .venv (6 GB with torch; once)"
  # uv does not read pip's configuration: an index that is set for pip alone is passed on.
  if [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}${UV_CONFIG_FILE:-}" ]; then
    index=$("$python" -m pip config get global.index-url 2>/dev/null || true)
    [ -z "$index" ] || export UV_DEFAULT_INDEX="$index"
  fi
  [ -x .venv/bin/python ] || "$uv" venv --quiet --python "$python" .venv
  "$uv" pip install --python .venv/bin/python -c constraints.txt -e '.[train,registry,lake,dev]'
  printf '%s\n' "$wanted" > "$stamp"
fi

# 4. The jars.
say 4/4 "the jars of Kafka and S3Proxy"
.venv/bin/rollwire fetch
say done "'make demo' runs the demo, 'make test' the tests"
