#!/usr/bin/env bash
# A cluster on this machine: one master and two nodes as processes on loopback. Puts, reads and removes objects with the
# command line, survives the loss of a node, and shuts everything down.
#
#     cargo build --release --bin moontide
#     PATH="$PWD/target/release:$PATH" examples/shell/cluster.sh
#
# Exits with 0 if every result was as expected. On several hosts the commands are the same, with the configuration files
# in examples/config.
set -euo pipefail

work=$(mktemp -d)
pids=()
cleanup() {
    # After a failure: ends what still runs and shows the logs of the processes.
    local code=$?
    if ((code != 0)); then
        kill "${pids[@]}" 2>/dev/null || true
        cat "$work"/*.err >&2 2>/dev/null || true
    fi
    rm -rf "$work"
}
trap cleanup EXIT

# start NAME LINE ARGUMENTS…: runs `moontide ARGUMENTS…` with its output in files NAME.*, and waits until it has printed
# a line that starts with LINE.
start() {
    local name=$1 ready=$2
    shift 2
    moontide "$@" >"$work/$name.out" 2>"$work/$name.err" &
    pids+=($!)
    for _ in $(seq 300); do
        grep -q "^$ready" "$work/$name.out" && return
        kill -0 $! 2>/dev/null || break
        sleep 0.1
    done
    echo "$name did not start" >&2
    return 1
}
expect() {
    [[ "$1" == "$2" ]] || { echo "expected '$2', got '$1'" >&2; exit 1; }
}

# Port 0 takes a free port; the process prints the one that it got. `admin` is the last line of a master.
start master admin master --grpc-listen 127.0.0.1:0 --frame-listen 127.0.0.1:0 --admin-listen 127.0.0.1:0 --groups 4
MOONTIDE_MASTER=$(awk '$1 == "grpc" {print $2}' "$work/master.out")
export MOONTIDE_MASTER  # for the commands below
for name in node-a node-b; do
    start "$name" ready node --master "$MOONTIDE_MASTER" --memory-bytes 64MiB --host "$name"
done

# An object with two replicas is on both nodes.
head -c 300000 /dev/urandom >"$work/block"
moontide put block-0001 "$work/block" --replicas 2
moontide get block-0001 -o "$work/copy"
cmp "$work/block" "$work/copy"
echo "the tide is high" | moontide put greeting
expect "$(moontide get greeting)" "the tide is high"
expect "$(moontide ls)" $'block-0001\ngreeting'
moontide stat block-0001

# A removed object is gone: exit code 3.
moontide rm greeting
code=0; moontide get greeting >"$work/none" 2>&1 || code=$?
expect "$code" 3

# SIGTERM is a clean shutdown, with exit code 0. The other replica remains readable.
kill "${pids[1]}"
wait "${pids[1]}"
moontide get block-0001 -o "$work/copy"
cmp "$work/block" "$work/copy"
kill "${pids[2]}" && wait "${pids[2]}"
kill "${pids[0]}" && wait "${pids[0]}"
pids=()
echo "one master, two nodes: ok"
