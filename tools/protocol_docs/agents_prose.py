"""The prose of docs/protocol-agents.md: what the author of an agent or a trainer needs besides the message tables."""

INTRODUCTION = """
# The trainctl protocol between agents and trainers, version {version}

This page describes the messages between an agent and its trainers, and between the agents of a run's nodes. Clients
don't need it: [protocol.md](protocol.md) is the page for clients. That page also describes the encoding, the limits,
the keys, the message parts that both pages use, and the version history.

This page is generated from the message types; don't edit it.
"""

SOCKETS = """
## Sockets

- **Plans and reports**, between an agent and its trainers: the trainer connects a DEALER with a random identity to the
  agent's ROUTER at an `ipc://` path.
- **Peers**, between the lead's agent and a follower's agent: the lead connects a DEALER to the follower's ROUTER for
  requests. `link` identifies the conversation. Both sides number their messages from 1. If a number is missing, the
  conversation restarts with a [PeerHello](#peerhello).

In both cases, a message is one frame. The sockets have [the same options as clients](protocol.md#sockets).
"""

LEADS = """
## Leads and followers

One agent, the lead, plans a run; the agents of its other nodes follow. A follower obeys only the lead with the newest
term. The lead sends everything that it records to the followers, in [PeerKeep](#peerkeep) messages. Each item is one of
the messages [kept by followers](#kept-by-followers), encoded as msgpack. A [HostedRank](#hostedrank) contains the
newest entries in a follower's record. After a [PeerHello](#peerhello), the lead sends the missing entries.

### Promotion

The new lead claims a new term with a [PeerClaim](#peerclaim). If the old lead is reachable, the claimant asks only the
old lead, and the old lead hands the run over. Otherwise the claimant asks all other nodes. A majority of the cluster's
nodes must then consent, unless the command has `old_lead_is_off`.

The claimant first sends a claim in term 0. It is only a query: the answers show whether a majority is reachable and
which terms the nodes have seen. A node consents to one claimant per term. No two nodes with the same cluster file can
claim the same term: sort the names of the cluster's n nodes; the first node claims multiples of n, the second node
claims terms with a remainder of 1, and so on.

A lead that receives a PeerHello with a newer term of its run becomes a follower. A lead that handed its run over waits
10 s for the claimant's PeerHello. If none arrives, it claims the run again in a newer term.

### Leaving

A follower whose machine is about to go says so with `leaving` in each [PeerBeat](#peerbeat) and in its
[PeerWelcome](#peerwelcome). The lead has its ranks leave the group at the next step, and sends their trainers a Leave
once the others have formed a group. When the node's agent is connected again without `leaving`, the lead starts them.

A lead whose own machine is about to go sets `yields` in each [PeerPing](#peerping) to one follower that stays. That
follower then claims the run, and the old lead, now a follower, leaves as any other does.

### Resume

`start-run` with `resume` goes to the run's last lead (a `not-lead` refusal gives the lead's address). If that node is
unreachable, or if the command names a different `node`, that different node claims the run in the same way, with
`resume` set. Its claim in term 0 finds nodes that still take part in an active run, before any node has consented. If
the old lead is unreachable, the new lead leaves out its rank. All other nodes of the run must be reachable, and so must
the newest checkpoint. With `old_lead_is_off`, an older checkpoint is enough. """

BYTES = "These are complete frames in hexadecimal, as written by this implementation."

SHOWN = (("agent to trainer", "step-plan"), ("trainer to agent", "formed"))
"""The byte vectors on the page."""
