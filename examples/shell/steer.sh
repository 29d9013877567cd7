#!/bin/sh
# Halves a node's micro-batch when its memory is short, writes a checkpoint, and says how each command ended.
#
#   steer.sh studio 4
#
# Everything is trainctl's own: no JSON has to be read, for the exit code says how a command ended and one line says at
# which step or why not. $TRAINCTL_CONNECT names the agent.
set -u

node=${1:?usage: steer.sh NODE MICRO_BATCH}
micro=${2:?usage: steer.sh NODE MICRO_BATCH}
trainctl=${TRAINCTL:-trainctl}

new_id() {
  if command -v uuidgen >/dev/null; then uuidgen; else cat /proc/sys/kernel/random/uuid; fi
}

# send VERB [ARGUMENT ...]: one command under one id, sent again if the line or the time gave out. Whatever became of
# the first try, the same id is carried out once and tells its outcome.
send() {
  id=$(new_id)
  for try in 1 2 3; do
    $trainctl send "$@" --id "$id" --timeout 30
    code=$?
    case $code in
      0) return 0 ;;                                  # applied: the line on standard output names the step
      4 | 5) echo "try $try of 3: exit code $code" >&2 ;;  # not in time, or nobody answered
      *) return $code ;;                              # 2 usage, 3 rejected or failed, 6 not authorised: say it once
    esac
  done
  return $code
}

$trainctl status || exit
send resize-batch "micro=$micro" --node "$node" || exit
send checkpoint
