"""The parts of docs/protocol.md that are no table: what the writer of a client needs around the message types."""

INTRODUCTION = """
# The trainctl protocol, version {version}

How a client talks to a node's agent: ZeroMQ sockets, msgpack frames, and the messages in the tables below. Another
language can speak the protocol from this page alone. [protocol.schema.json](protocol.schema.json) has the same types
as JSON Schema, and `tests/golden/wire/` has byte vectors to test an implementation with. What agents say to each other
and to trainers is in [protocol-agents.md](protocol-agents.md); a client doesn't need it.

A **rank** is one trainer of a run, one per device. Its **share** is the number of samples of each global batch that it
works through. The **lead** is the node whose agent plans the run; the agents of the run's other nodes follow it. A
**generation** is one formation of the group of ranks.

This page is generated from the message types; don't edit it.
"""

SOCKETS = """
## Sockets

- **Requests and replies**: a DEALER socket of the client, connected to the agent's ROUTER, by default
  `tcp://127.0.0.1:7474`. The DEALER sets no identity; an agent with keys refuses one that does. Each message is one
  frame: the msgpack of one message.
- **Live messages**: a SUB socket of the client, subscribed to the empty prefix, connected to the agent's PUB. It is
  bound to the next port; a snapshot's `node.live_address` has the address. Each message is two frames: a topic, and the
  msgpack of one message.

The topic repeats the `type` of the second frame in one word. Subscribe to all topics: with only some of them, the gaps
in the numbers look like lost messages.

| socket | options |
| --- | --- |
| all | LINGER 0, MAXMSGSIZE the frame limit, RECONNECT_IVL 200, RECONNECT_IVL_MAX 5000 |
| all | HANDSHAKE_IVL 2000; 1000 where an agent is bound |
| DEALER | HEARTBEAT_IVL 1000, HEARTBEAT_TIMEOUT 3000, HEARTBEAT_TTL 3000, IMMEDIATE 1 |
| SUB | RCVHWM 10000, TCP_KEEPALIVE, no heartbeats |
| PUB | SNDHWM 1000 |

With IMMEDIATE, an agent that starts an hour later doesn't get an old request. A SUB has no heartbeats because libzmq
4.3.5 aborts the program if more than RCVHWM messages wait for longer than a heartbeat's answer may take.

An agent disconnects a subscriber that sends more than 32 messages over one connection, or one message of more than
64 bytes, because ZeroMQ keeps every topic in memory.
"""

KEYS = """
## Keys

Off loopback an agent requires keys. On loopback it requires them if the cluster file names a key for its node, or with
`--keys require`. Otherwise there is no security mechanism (ZeroMQ's NULL), and a forwarded port is as good as a login.
With keys, both sockets of the agent are CURVE servers. A client sets three options on its DEALER and its SUB before it
connects. Each is a key in Z85, 40 characters of text:

| option | key |
| --- | --- |
| CURVE_SERVERKEY | the agent's public key, the same for both sockets |
| CURVE_PUBLICKEY | the client's public key |
| CURVE_SECRETKEY | the client's secret key |

Where to find the agent's public key: `trainctl keys list` on its machine shows it, and the cluster file names it
(`[nodes.NAME] key`). The keys of the cluster's other agents are in a snapshot's `peers`; a refusal `not-lead` has the
lead's as `lead_key`.

Where to find the client's own pair: in `user.toml` (`agent.toml` for the machine's agent), in `$TRAINCTL_KEYS` or in
`trainctl/keys` in the user's configuration folder. The file is TOML with the lines `name = "..."`, `public = "..."` and
`secret = "..."`. `trainctl keys new` makes both files. `trainctl keys authorize NAME PUBLIC --role ROLE` on the agent's
machine lets a key in.

| role | may |
| --- | --- |
| `viewer` | ask for everything except the list of refusals, and subscribe; may not send commands |
| `operator` | send commands too |
| `node` | speak as the agent of the node of that name, and ask for logs; may not send commands |

The agent looks up the role for every message. If a key is revoked or gets another role, its next message is answered
by a [Refusal](#refusal) `not-authorised`. A key that doesn't match shows as a connection error, not as a reply, so
watch the socket's events:

| the client has | event |
| --- | --- |
| a key that isn't let in | HANDSHAKE_FAILED_AUTH |
| no key where one is required, or a key where none is used | HANDSHAKE_FAILED_PROTOCOL, mechanism mismatch |
| the wrong CURVE_SERVERKEY | the agent closes the connection |
"""

ENCODING = """
## Encoding

A frame is one msgpack map with string keys. Every message has `type`, which says what it is, and `v`, the protocol
version. A message of another version is refused, by a `refusal` of code `version` where a reply is due. Strings are
UTF-8 `str`. Numbers are msgpack integers and 64-bit floats; an integer may stand for a float. Some small types are
arrays; their tables say so. An absent optional field has its default. Null is written, not left out.

In a message from a client, unknown fields, unknown arguments, NaN and infinities are refused. In every other message
the receiver ignores unknown fields, and a float may be NaN. Fields named `*_at` are Unix seconds. Every duration is in
seconds, by a monotonic clock.
"""

LIMITS = """
## Limits

A frame over one of these limits is refused before its type is read. A message of more frames than its socket uses is
refused whole. "Published" is what a SUB receives. The last column is for replies, and for messages between agents and
trainers.
"""

CONVERSATIONS = """
## Requests, replies, commands

Each request carries a `rid` that the client chooses, and each reply brings it back. Replies may come in another order
than the requests. An agent answers within 5 s; for the verbs `start-run` and `promote` it asks other nodes, and answers
within 20 s. A request that only asks may be sent again at any time. A request that can't be answered gets a
[Refusal](#refusal); its `rid` is empty if none could be read.

| code of a refusal | meaning |
| --- | --- |
| `version` | the agent speaks another version of the protocol |
| `malformed`, `unknown-type` | the frame is no message, or a field is wrong: the text names it |
| `unknown-run`, `unknown-rank` | this node has no such run, or the run no such rank |
| `busy` | the agent can't answer now, for instance because its disk is full: try again |
| `not-lead` | another agent must be asked: `lead` is its address, `lead_key` its key. Send it the same request |
| `not-authorised` | the key is not let in, or its role doesn't allow this |

A [Command](#command) changes something. Its first reply has the state `accepted` once it is journaled, or a final
state at once. An accepted command gets exactly one more reply, when it ends:

| state | meaning |
| --- | --- |
| `applied` | it took effect at `step`, on every rank |
| `rejected` | it is not possible: `field` is the argument at fault, `reason` says why. Nothing was changed |
| `expired` | it could not take effect within `ttl_seconds` of its receipt. Nothing was changed |
| `failed` | it began and went wrong |
| `conflict` | its `id` was used before for another command |

The `id` is a UUID that the client makes. A command sent again under the same `id` is carried out once: the agent
answers with the first one's outcome, or with `accepted` and then the outcome. So after a lost connection, or after some
seconds without a reply, send the same command again, `rid` included. Another client may do this, at any later time.
The same `id` with another verb, `args`, `node`, `run` or `if_plan` is a `conflict`.

`if_plan` makes a command conditional on the plan version that it was computed from. Arguments are absolute values,
never differences.

`promote` goes to the agent of the node that will lead. `start-run` with `resume` resumes a run that has ended: it goes
to the agent of the node that led it last (`not-lead` names it), or to any other node with a copy of its record, which
the command then names as `node`. [protocol-agents.md](protocol-agents.md#leads-and-followers) says what the agents do
then.
"""

ATTACHING = """
## Attaching

To follow an agent without a gap:

1. Ask for a [Snapshot](#snapshot) with `columns` 0. Connect a SUB socket to its `node.live_address`, subscribed to
   everything.
2. Ask for a second snapshot, with the resolution you want. Keep its `boot` and `seq`, and show it.
3. Compare each live message with yours. Another `boot`: the agent was restarted; begin at 1 again. A `seq` at or below
   yours: drop the message. The next `seq`: deliver it. A later `seq`: messages were lost. Fetch them with a
   [GapRequest](#gaprequest) from yours + 1 to the one before it, at most 400 at a time. Deliver those, then it.
   `complete: false` means that some are no longer kept: begin at 1 again.
4. A [Heartbeat](#heartbeat) comes each second. It has no number of its own: its `seq` is that of the newest message, so
   the loss of that one is noticed too. After 3.5 s without any message the agent counts as silent.
"""

MESSAGES = (
    """Every message also has `type` and `v`. "Default" is what an absent field means; "required" can't be left out."""
)

METRICS = """What a [HistoryRequest](#historyrequest) can name, and the unit of the series that come back."""

VERBS = """What a command can be. Client and agent check arguments alike; an argument that a verb doesn't have is
refused."""

BYTES = """
Whole frames in hexadecimal, as this implementation writes them. The order of a map's keys has no meaning. A receiver
must read all of `tests/golden/wire/`; NaN is null in the JSON there.
"""

SHOWN = (
    ("client to agent", "snapshot-request"),
    ("client to agent", "command"),
    ("agent to client", "command-reply"),
    ("agent to client", "refusal"),
    ("published by an agent", "step-committed"),
    ("published by an agent", "heartbeat"),
)
"""The vectors that the page shows."""
