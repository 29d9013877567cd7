// A client for trainctl agents, based on docs/protocol.md: requests, and commands that can be repeated with their id.

import { randomBytes, randomUUID } from "node:crypto";
import { existsSync, readdirSync, readFileSync } from "node:fs";
import { homedir, hostname, platform } from "node:os";
import { join } from "node:path";
import { decode, encode } from "@msgpack/msgpack";
import { Dealer } from "zeromq";

const VERSION = 2;
const FRAME_BYTES = 1_048_576;
const LIMITS = { maxStrLength: FRAME_BYTES, maxBinLength: 65_536, maxArrayLength: 16_384, maxMapLength: 256, maxExtLength: 0 };
const FINAL_STATES = new Set(["applied", "rejected", "expired", "failed", "conflict"]);
const EXIT_CODES = { usage: 2, "not-authorised": 6, version: 5, unreachable: 5, expired: 4 };

/** An error as one line; `code` is the refusal's code, `exitCode` that of `trainctl send`. */
export class TrainctlError extends Error {
  constructor(code, message, lead = null) {
    super(message);
    Object.assign(this, { code, lead, exitCode: EXIT_CODES[code] ?? 3 });
  }
}

/** The address of the only agent that this user runs on this machine. Throws a TrainctlError. */
export function localAgent() {
  const state = platform() === "darwin" ? join(homedir(), "Library", "Application Support") : (process.env.XDG_STATE_HOME ?? join(homedir(), ".local", "state"));
  const folder = join(process.env.TRAINCTL_STATE ?? join(state, "trainctl"), ".agents");
  const files = existsSync(folder) ? readdirSync(folder).filter((name) => /^[^.].*\.json$/.test(name)) : [];
  const agents = files.map((name) => JSON.parse(readFileSync(join(folder, name), "utf8"))).filter(({ host, pid }) => host === hostname() && runs(pid));
  const clusters = new Set(agents.map(({ address, cluster }) => (cluster.length ? cluster.join() : address)));
  if (clusters.size !== 1) throw new TrainctlError("unreachable", clusters.size ? "several agents run here: give --connect" : "no agent runs here: start one with trainctl-agent run");
  return agents[0].address;
}

/** Whether a process of this user has this number. */
function runs(pid) {
  try {
    return process.kill(pid, 0);
  } catch {
    return false;
  }
}

/**
 * A connection to one agent. `keys` is {publicKey, secretKey, serverKey} in Z85 if the agent requires keys, else null.
 * `answerSeconds` is how long to wait for an answer before a retry.
 */
export class Client {
  #socket;
  #inboxes = new Map(); // rid -> Inbox

  constructor(address, { by = "nodejs", keys = null, answerSeconds = 5 } = {}) {
    Object.assign(this, { address, by, keys, answerSeconds });
    this.#socket = newSocket(keys, answerSeconds);
    let failures = 0;
    const refused = (text) => {
      for (const inbox of this.#inboxes.values()) inbox.put({ type: "refusal", code: "not-authorised", text: `${address}: ${text}` });
    };
    const broken = ({ error }) => {
      if (++failures < 2 && error.code !== "ERR_ZMTP_MECHANISM_MISMATCH") return; // a single failure may be an agent that is stopping
      refused(keys ? "the agent's key differs from the one that this client expects" : "the agent requires keys: give --server-key");
    };
    const { events } = this.#socket;
    events.on("handshake:error:auth", () => refused("the agent has not authorised this key; run trainctl keys authorize on its machine"));
    events.on("handshake:error:protocol", broken);
    events.on("handshake:error:other", broken);
    events.on("handshake", () => (failures = 0));
    this.#socket.connect(address);
    this.#receive();
  }

  close() {
    this.#socket.close();
  }

  /** The reply to a request that changes nothing, such as `snapshot-request`. Throws a TrainctlError. */
  async ask(type, fields = {}, seconds = 10) {
    const reply = await this.#converse({ type, v: VERSION, rid: newRid(), ...fields }, seconds, () => true);
    return reply ?? this.#fail("unreachable", `no answer from ${this.address} within ${seconds} s`);
  }

  /**
   * The last reply to a command. Every retry has the same id, so the command is carried out once. A later call with the
   * same id gets the same outcome. Throws a TrainctlError, including when it isn't applied within `seconds`.
   */
  async send(verb, args, { node = null, run = null, ifPlan = null, id = randomUUID(), seconds = 60 } = {}) {
    const command = {
      type: "command", v: VERSION, rid: newRid(), id, verb, args, by: this.by, node, run, if_plan: ifPlan,
      issued_at: Date.now() / 1000, ttl_seconds: seconds,
    };
    let accepted = false;
    try {
      const reply = await this.#converse(command, seconds, ({ state }) => {
        accepted ||= state === "accepted";
        return FINAL_STATES.has(state);
      });
      if (reply) return reply;
    } catch (error) {
      if (error.code !== "not-lead" || !error.lead) throw error;
      return await this.#sendElsewhere(error.lead, verb, args, { node, run, ifPlan, id, seconds });
    }
    return accepted
      ? this.#fail("expired", `${verb}: accepted, but not applied within ${seconds} s; its id is ${id}`)
      : this.#fail("unreachable", `no answer from ${this.address} within ${seconds} s; the command's id is ${id}`);
  }

  /** Sends the command to the agent that leads the run, using the key that this agent has for it. */
  async #sendElsewhere(lead, verb, args, options) {
    const { peers } = await this.ask("snapshot-request", { columns: 0 });
    const serverKey = peers.find((peer) => peer.address === lead)?.key;
    const client = new Client(lead, { ...this, keys: this.keys && { ...this.keys, serverKey } });
    try {
      return await client.send(verb, args, options);
    } finally {
      client.close();
    }
  }

  /** Sends a message, retries while there is no answer, and returns the last reply; null when the time is up. */
  async #converse(message, seconds, isLast) {
    const inbox = new Inbox();
    this.#inboxes.set(message.rid, inbox);
    try {
      const deadline = Date.now() + seconds * 1000;
      let isAnswered = false;
      while (Date.now() < deadline) {
        this.#socket.send(encode(message)).catch(() => {}); // no agent there yet: retry later
        const left = () => Math.min(this.answerSeconds * 1000, deadline - Date.now());
        for (let reply; (reply = await inbox.take(left())) !== null; ) {
          if (reply.type === "refusal") this.#fail(reply.code, reply.text, reply.lead);
          if (isLast(reply)) return reply;
          isAnswered = true;
        }
        if (!isAnswered && message.id) console.error(`${this.address} is silent: retrying with id ${message.id}`);
      }
      return null;
    } finally {
      this.#inboxes.delete(message.rid);
    }
  }

  async #receive() {
    for await (const frames of this.#socket) {
      if (frames.length !== 1) continue;
      const reply = decode(frames[0], LIMITS);
      for (const [rid, inbox] of this.#inboxes) if (reply.rid === rid || reply.rid === "") inbox.put(reply);
    }
  }

  #fail(code, text, lead) {
    throw new TrainctlError(code, text, lead);
  }
}

/** Replies that have arrived but haven't been read yet. */
class Inbox {
  #items = [];
  #wake = () => {};

  put(item) {
    this.#items.push(item);
    this.#wake();
  }

  /** The next reply, or null after this many milliseconds. */
  async take(milliseconds) {
    if (this.#items.length === 0) {
      let timer;
      await new Promise((done) => {
        this.#wake = done;
        timer = setTimeout(done, Math.max(0, milliseconds));
      });
      clearTimeout(timer);
    }
    return this.#items.shift() ?? null;
  }
}

/** A DEALER socket with the settings that the protocol requires. */
function newSocket(keys, sendSeconds) {
  return new Dealer({
    linger: 0, // no routingId: the agent's side then generates one that no other client can claim
    immediate: true, // queue nothing for an agent that isn't connected
    maxMessageSize: FRAME_BYTES,
    handshakeInterval: 2000,
    heartbeatInterval: 1000,
    heartbeatTimeout: 3000,
    heartbeatTimeToLive: 3000,
    reconnectInterval: 200,
    reconnectMaxInterval: 5000,
    sendTimeout: sendSeconds * 1000,
    ...(keys && { curvePublicKey: keys.publicKey, curveSecretKey: keys.secretKey, curveServerKey: keys.serverKey }),
  });
}

function newRid() {
  return randomBytes(16).toString("hex");
}
