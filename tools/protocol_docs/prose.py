"""The prose of docs/protocol.md: what the author of a client needs besides the message tables."""

INTRODUCTION = """
# The trainctl protocol, version {version}

This page describes how a client talks to a node's agent: ZeroMQ sockets, msgpack frames, and the messages in the tables
below. It contains everything that you need to write a client in any language.
[protocol.schema.json](protocol.schema.json) has the same types as JSON Schema. `tests/golden/wire.jsonl` has a byte
vector on each line, for testing an implementation. [protocol-agents.md](protocol-agents.md) describes the messages
between agents and trainers; clients don't need them.

A **rank** is one trainer of a run; each device has one. A rank's **share** is the number of samples that it processes
in each global batch. The **lead** is the node whose agent plans the run; the agents of the other nodes follow it. A
**generation** is one formation of the group of ranks.

This page is generated from the message types; don't edit it.
"""

SOCKETS = """
## Sockets

- **Requests and replies**: the client connects a DEALER socket to the agent's ROUTER, by default at
  `tcp://127.0.0.1:7474`. The DEALER must not set an identity if the agent uses keys. Each message is one frame of
  msgpack.
- **Live messages**: the client connects a SUB socket to the agent's PUB and subscribes to the empty prefix. The PUB
  uses the next port; a snapshot's `node.live_address` gives its address. Each message has two frames: a topic, and one
  message as msgpack.

The topic is a short name for the second frame's `type`. Subscribe to all topics. If you subscribe to only some, the
gaps in the sequence numbers look like lost messages.

| socket | options |
| --- | --- |
| all | LINGER 0, MAXMSGSIZE the frame limit, RECONNECT_IVL 200, RECONNECT_IVL_MAX 5000 |
| all | HANDSHAKE_IVL 2000; 1000 on an agent's bound sockets |
| DEALER | HEARTBEAT_IVL 1000, HEARTBEAT_TIMEOUT 3000, HEARTBEAT_TTL 3000, IMMEDIATE 1 |
| SUB | RCVHWM 10000, TCP_KEEPALIVE, no heartbeats |
| PUB | SNDHWM 1000 |

IMMEDIATE prevents an agent from receiving old requests when it starts much later. The SUB has no heartbeats because of
a bug in libzmq 4.3.5: the program aborts if more than RCVHWM messages wait for longer than the heartbeat timeout.

An agent disconnects a subscriber that sends more than 32 messages over one connection, or a message of more than 64
bytes, because ZeroMQ keeps every subscription in the agent's memory.
"""

KEYS = """
## Keys

An agent that listens beyond loopback requires keys. On loopback, it requires keys if the cluster file has a key for its
node, or with `--keys require`. Otherwise it uses ZeroMQ's NULL mechanism: anyone who can reach the port, for example
through port forwarding, has full access. With keys, both agent sockets are CURVE servers. A client sets three options
on its DEALER and its SUB before it connects. Each is a key in Z85 (40 characters of text):

| option | key |
| --- | --- |
| CURVE_SERVERKEY | the agent's public key, the same for both sockets |
| CURVE_PUBLICKEY | the client's public key |
| CURVE_SECRETKEY | the client's secret key |

To find an agent's public key, run `trainctl keys list` on its machine or look in the cluster file (`[nodes.NAME] key`).
A snapshot's `peers` has the keys of the cluster's other agents. A `not-lead` refusal gives the lead's key as
`lead_key`.

The client's own key pair is in `user.toml` (the agent's pair is in `agent.toml`). These files are in `$TRAINCTL_KEYS`,
or in `trainctl/keys` in the user's configuration folder. Each is a TOML file with the lines `name = "..."`,
`public = "..."` and `secret = "..."`. `trainctl keys new` creates both files. To authorise a key, run
`trainctl keys authorize NAME PUBLIC --role ROLE` on the agent's machine.

| role | permissions |
| --- | --- |
| `viewer` | subscribe, and all requests but commands, attached runs, digests, disk speeds, calibrations and refusals |
| `operator` | subscribe, and send all requests |
| `node` | act as the agent of the node with that name, and request logs |

The agent checks the role for every message. If a key is revoked or loses a permission, its next message gets a
`not-authorised` [Refusal](#refusal). A wrong key causes a connection error instead of a reply, so watch the socket's
events:

| the client has | event |
| --- | --- |
| an unauthorised key | HANDSHAKE_FAILED_AUTH |
| no key but the agent requires one, or a key but the agent uses none | HANDSHAKE_FAILED_PROTOCOL, mechanism mismatch |
| the wrong CURVE_SERVERKEY | the agent closes the connection |
"""

ENCODING = """
## Encoding

A frame is one msgpack map with string keys. Every message has a `type` and the protocol version `v`. Messages with a
different version are refused; a request gets a `refusal` with the code `version`. Strings are UTF-8 `str`. Numbers are
msgpack integers and 64-bit floats; an integer is valid where a float is expected. Some small types are encoded as
arrays; their tables say so. An absent optional field has its default value. Write null explicitly instead of omitting
the field.

Agents refuse client messages with unknown fields, unknown arguments, NaN or infinities; only the values of a
[RunSteps](#runsteps) may be NaN. In all other messages, the receiver ignores unknown fields, and floats may be NaN.
Fields named `*_at` are Unix seconds. Durations are in seconds, measured with a monotonic clock.
"""

LIMITS = """
## Limits

A frame that exceeds one of these limits is refused before its type is read. A message with the wrong number of frames
is also refused. "Published" means messages that a SUB receives. "Elsewhere" means replies and messages between agents
and trainers.
"""

CONVERSATIONS = """
## Requests, replies, commands

Each request has a `rid`, chosen by the client, and the reply repeats it. Replies may arrive in any order. An agent
replies within 5 s. For `start-run` and `promote` it asks other nodes first, and replies within 20 s. Requests that
change nothing can be repeated at any time. A request that the agent can't answer gets a [Refusal](#refusal). Its `rid`
is empty if the request's `rid` was unreadable.

| refusal code | meaning |
| --- | --- |
| `version` | the agent uses a different protocol version |
| `malformed`, `unknown-type` | the frame is not a valid message; the text names the wrong field |
| `unknown-run`, `unknown-rank` | this node has no such run, or the run has no such rank |
| `busy` | the agent can't carry out the request now, for example because its disk is full; try again later |
| `not-lead` | send the same request to the lead: `lead` is its address, `lead_key` its key |
| `not-authorised` | the key isn't authorised, or its role doesn't allow this |

A [Command](#command) changes something. Its first reply is either `accepted`, after the agent has journaled it, or a
final state. An accepted command gets exactly one more reply when it ends:

| state | meaning |
| --- | --- |
| `applied` | the command took effect at `step`, on every rank |
| `rejected` | the command is not possible: `field` is the invalid argument, `reason` says why. Nothing changed |
| `expired` | the command couldn't take effect within `ttl_seconds` of its receipt. Nothing changed |
| `failed` | the command started and then failed |
| `conflict` | the `id` was already used for a different command |

The client creates the `id`, a UUID. A command that is sent again with the same `id` is carried out only once. The agent
replies with the outcome, or with `accepted` and then the outcome. After a lost connection, or a few seconds without a
reply, send the same command again with the same `rid`. A different client may also do this, at any time. If the same
`id` comes with a different verb, `args`, `node`, `run` or `if_plan`, the reply is `conflict`.

With `if_plan`, the agent rejects the command if the plan version has changed. Arguments are absolute values, never
differences.

Send `promote` to the agent of the new lead. To resume an ended run, send `start-run` with `resume` to the agent of the
run's last lead. If you send it to a different agent, the `not-lead` refusal gives the lead's address. You can also send
it to any node that has a copy of the run's record, if you name that node as the command's `node`.
[protocol-agents.md](protocol-agents.md#leads-and-followers) describes what the agents do for a promotion and for a
resume. """

ATTACHING = """
## Attaching

To receive every message of an agent:

1. Request a [Snapshot](#snapshot) with `columns` 0. Connect a SUB socket to its `node.live_address` and subscribe to
   everything.

2. Request a second snapshot with the resolution that you need. Store its `boot` and `seq`, and display the snapshot.

3. Compare the `boot` and `seq` of each live message with the stored values. If the `boot` differs, the agent was
   restarted: start again at step 1. If the `seq` isn't larger than yours, drop the message. If it is the next number,
   process the message. If it is larger than that, messages were lost. Request them with a [GapRequest](#gaprequest), at
   most 400 at a time, and process them before this message. If the reply has `complete: false`, start again at step 1.

4. The agent sends a [Heartbeat](#heartbeat) every second. Its `seq` is the newest message's number, so you also notice
   when the newest message was lost. Treat the agent as silent after 3.5 s without any message.
"""

MESSAGES = (
    """Every message also has `type` and `v`. An absent field has its default; required fields must be present."""
)

METRICS = """The metrics that a [HistoryRequest](#historyrequest) can name, with the units of the returned series."""

VERBS = """Each command has one of these verbs. Client and agent both check the arguments and refuse unknown ones."""

BYTES = """
These are complete frames in hexadecimal, as written by this implementation. The order of a map's keys doesn't matter. A
receiver must be able to read all of `tests/golden/wire.jsonl`. The JSON there has null in place of NaN.
"""

SHOWN = (
    ("client to agent", "snapshot-request"),
    ("client to agent", "command"),
    ("agent to client", "command-reply"),
    ("agent to client", "refusal"),
    ("published by an agent", "step-committed"),
    ("published by an agent", "heartbeat"),
)
"""The byte vectors on the page."""
