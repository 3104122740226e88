# Services that a demonstration starts and stops; to be sourced after lib.sh. Their data, addresses and logs are in
# $work, under the names of the services.

work=$(mktemp -d)
started=()
declare -A process # by name
# Ends what was started here, the latest first.
stop() {
  local each
  for ((each = ${#started[@]} - 1; each >= 0; each--)); do
    if kill -TERM "${started[each]}" 2>/dev/null; then
      wait "${started[each]}" || true
    fi
  done
  rm -rf "$work"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# await NAME CONDITION...: waits until the condition holds, while the service of that name is alive.
await() {
  local name=$1
  shift
  until "$@" 2>/dev/null; do
    if ! kill -0 "${process[$name]}" 2>/dev/null; then
      echo "The $name did not start:" >&2
      cat "$work/$name.log" >&2
      exit 1
    fi
    sleep 0.2
  done
}

# launch NAME COMMAND [ARGUMENT...]: starts a service that writes its address once it serves.
launch() {
  local name=$1 command=$2
  shift 2
  rm -f "$work/$name.address"
  "$command" --data-dir "$work/$name" --ready-file "$work/$name.address" "$@" >>"$work/$name.log" 2>&1 &
  process[$name]=$!
  started+=($!)
}

# ready NAME: waits until a service that was launched serves.
ready() { await "$1" test -s "$work/$1.address"; }

# serve NAME [FLAG...]: starts a server of questions on a free port.
serve() {
  local name=$1
  shift
  launch "$name" blend-server --address 127.0.0.1:0 "$@"
  ready "$name"
}

# client NAME COMMAND...: the client of the service of that name.
client() {
  local name=$1 address
  shift
  # No $(cat): a signal that ends only the cat would have the client run, and fail, without an address.
  read -r address <"$work/$name.address"
  blend-client --address "$address" "$@"
}

listens() { : <>"/dev/tcp/127.0.0.1/$1"; }

# free_ports COUNT: prints ports of this machine that nobody uses.
free_ports() {
  python - "$1" <<'PYTHON'
import socket
import sys

sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(int(sys.argv[1]))]
print(*(each.getsockname()[1] for each in sockets))
PYTHON
}

# start_master: starts the master of a Mooncake store on free ports, $rpc and $admin.
start_master() {
  local binary
  binary=$(
    python - <<'PYTHON'
import importlib.util
import pathlib
import sys

from blend.errors import TierUnavailable
from blend.store.mooncake import library

try:
    library()
except TierUnavailable as error:
    sys.exit(str(error))
print(pathlib.Path(importlib.util.find_spec("mooncake").origin).parent / "mooncake_master")
PYTHON
  )
  read -r rpc admin < <(free_ports 2)
  "$binary" --rpc_address=127.0.0.1 --rpc_port="$rpc" --metrics_host=127.0.0.1 --metrics_port="$admin" --logtostderr \
    >"$work/master.log" 2>&1 &
  process[master]=$!
  started+=($!)
  await master listens "$admin"
  await master listens "$rpc"
}
