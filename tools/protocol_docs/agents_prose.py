"""The parts of docs/protocol-agents.md that are no table: what the writer of an agent or a trainer needs."""

INTRODUCTION = """
# The trainctl protocol between agents and trainers, version {version}

What a node's agent and its trainers say to each other, and what the agents of a run's nodes say to each other. A client
needs none of it: [protocol.md](protocol.md) is the page for clients. That page also has the encoding, the limits, the
keys, the parts of messages that both pages use, and the versions.

This page is generated from the message types; don't edit it.
"""

SOCKETS = """
## Sockets

- **Plans and reports**, agent and trainer: a DEALER of the trainer's with a random identity, connected to the agent's
  ROUTER at an `ipc://` path.
- **Peers**, the lead's agent and a follower's: a DEALER of the lead's, connected to the follower's ROUTER for requests.
  `link` names the conversation. Both sides number what they send from 1. If a number is missing, the conversation
  begins again with a [PeerHello](#peerhello).

A message is one frame in both. The options of the sockets are [those of clients](protocol.md#sockets).
"""

LEADS = """
## Leads and followers

One agent, the lead, plans a run; the agents of its other nodes follow. A follower obeys one lead: the one that greeted
it with the newest term. The lead sends all that it records of the run to the followers, in [PeerKeep](#peerkeep): each
item is the msgpack of one of the messages [kept by followers](#kept-by-followers). A [HostedRank](#hostedrank) says how
far a follower's record goes. After a greeting, the lead sends what is missing.

### Promotion

The agent that will lead claims a new term with a [PeerClaim](#peerclaim). If the lead is in touch, it asks only the
lead, which hands the run over. Otherwise it asks all other nodes, and a majority of the cluster's nodes must consent,
unless the command has `old_lead_is_off`.

It first asks in term 0, which binds no one: the answers show whether a majority is in reach, and which terms were seen.
A node consents to one claimant per term. Each node claims only terms of its own, so that no two nodes with the same
cluster file lead in one term: with the names of the cluster's n nodes sorted, the first claims multiples of n, the next
those with a remainder of 1, and so on.

A lead that is greeted with a newer term of its run stops leading and follows. A lead that handed its run over, and is
not greeted by the claimant within 10 s, claims it back in a newer term of its own.

### Resume

`start-run` with `resume` goes to the node that led the run last (`not-lead` names it). If that node is out of reach, or
the command names another `node`, that other node claims the run in the same way, with `resume` set. It asks in term 0
first: this finds a node that still takes part in an active run before any node has consented. The new lead leaves out
the old lead's rank if that node is out of reach. All other nodes of the run must be in reach, and so must the newest
checkpoint; with `old_lead_is_off`, an older one will do.
"""

BYTES = "Whole frames in hexadecimal, as this implementation writes them."

SHOWN = (("agent to trainer", "step-plan"), ("trainer to agent", "formed"))
"""The vectors that the page shows."""
