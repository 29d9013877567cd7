#!/bin/sh
# Sets a node's micro-batch, for example when its memory runs low, then writes a checkpoint.
#
#   steer.sh studio 4
#
# The script needs no JSON parser: the exit code says how a command ended, and one line has the step or the reason.
# $TRAINCTL_CONNECT names the agent.
set -u

node=${1:?usage: steer.sh NODE MICRO_BATCH}
micro=${2:?usage: steer.sh NODE MICRO_BATCH}
trainctl=${TRAINCTL:-trainctl}

new_id() {
  if command -v uuidgen >/dev/null; then uuidgen; else cat /proc/sys/kernel/random/uuid; fi
}

# send VERB [ARGUMENT ...]: send one command with one id, and retry after a lost connection or a timeout. Whatever happened
# to the first try, an agent carries out each id once and returns its outcome.
send() {
  id=$(new_id)
  for try in 1 2 3; do
    $trainctl send "$@" --id "$id" --timeout 30
    code=$?
    case $code in
      0) return 0 ;;                                  # applied: the line on standard output names the step
      4 | 5) echo "try $try of 3: exit code $code" >&2 ;;  # expired, or no agent answered
      *) return $code ;;                              # 2 usage, 3 rejected or failed, 6 not authorised: don't retry
    esac
  done
  return $code
}

$trainctl status || exit
send resize-batch "micro=$micro" --node "$node" || exit
send checkpoint
