#!/bin/sh
# Make the keys of the pods and of their users in keys/, and write base/cluster.toml with the public ones.
#
#     ./make-keys.sh PODS NETWORK        such as: ./make-keys.sh 3 10.244.0.0/16
#
# NETWORK is the network of the pods, in which gradients may travel. Keys that are there already stay, so that more pods
# can be added. It needs trainctl. keys/secret becomes the Secret; keep keys/ out of version control.
set -eu
if [ $# -ne 2 ]; then
  echo "usage: $0 PODS NETWORK" >&2
  exit 2
fi
cd "$(dirname "$0")"
umask 077
mkdir -p keys/secret

# One key for people and scripts in the pods, which every agent accepts as an operator's.
TRAINCTL_KEYS=keys/users trainctl keys new --name trainctl >/dev/null
cp -f keys/users/user.toml keys/users/authorized.toml keys/secret/

{
  echo "# Written by make-keys.sh: the pods of the StatefulSet, by the names that its headless Service gives them."
  echo "trusted_networks = [\"$2\"] # the network of the pods: gradients travel in it unencrypted"
  pod=0
  while [ "$pod" -lt "$1" ]; do
    name="trainctl-$pod"
    public=$(TRAINCTL_KEYS="keys/$name" trainctl keys new --name "$name" | awk '$1 == "agent" { print $2 }')
    cp -f "keys/$name/agent.toml" "keys/secret/$name.toml"
    printf '\n[nodes.%s]\naddress = "tcp://%s.trainctl:7474"\nkey = "%s"\n' "$name" "$name" "$public"
    pod=$((pod + 1))
  done
} >cluster.toml.new
chmod 644 cluster.toml.new
mv cluster.toml.new base/cluster.toml

cat <<'NEXT'
wrote base/cluster.toml; set replicas in base/statefulset.yaml to the number of pods, and run:
  kubectl create secret generic trainctl-keys --from-file=keys/secret --dry-run=client -o yaml | kubectl apply -f -
NEXT
