// A client of a trainctl agent, written from docs/protocol.md: requests, and commands that are repeated under their id.

import { randomBytes, randomUUID } from "node:crypto";
import { decode, encode } from "@msgpack/msgpack";
import { Dealer } from "zeromq";

const VERSION = 2;
const FRAME_BYTES = 1_048_576;
const LIMITS = { maxStrLength: FRAME_BYTES, maxBinLength: 65_536, maxArrayLength: 16_384, maxMapLength: 256, maxExtLength: 0 };
const FINAL_STATES = new Set(["applied", "rejected", "expired", "failed", "conflict"]);
const EXIT_CODES = { usage: 2, "not-authorised": 6, version: 5, unreachable: 5, expired: 4 };

/** What goes wrong, as one line; `code` is a refusal's, `exitCode` the one that `trainctl send` gives it. */
export class TrainctlError extends Error {
  constructor(code, message, lead = null) {
    super(message);
    Object.assign(this, { code, lead, exitCode: EXIT_CODES[code] ?? 3 });
  }
}

/**
 * One agent. `keys` is {publicKey, secretKey, serverKey} in Z85 for one that asks for keys, else null; `answerSeconds` is
 * how long an answer may take before the same is sent again.
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
      if (++failures < 2 && error.code !== "ERR_ZMTP_MECHANISM_MISMATCH") return; // once may be an agent that ends
      refused(keys ? "the agent's key differs from the known one" : "the agent requires keys: give --server-key");
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
   * The last reply to a command. However often it is sent it keeps its id, so it is carried out once, and whoever sends
   * it later under that id is told the same outcome. Throws a TrainctlError, also if it isn't applied within `seconds`.
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
      ? this.#fail("expired", `${verb}: accepted, not applied within ${seconds} s; its id is ${id}`)
      : this.#fail("unreachable", `no answer from ${this.address} within ${seconds} s; the command's id is ${id}`);
  }

  /** Another agent conducts the run: the same command goes there, by the key that this agent knows it by. */
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

  /** Sends, and the same again after each silence, until a reply is the last one; null once the time is up. */
  async #converse(message, seconds, isLast) {
    const inbox = new Inbox();
    this.#inboxes.set(message.rid, inbox);
    try {
      const deadline = Date.now() + seconds * 1000;
      let isAnswered = false;
      while (Date.now() < deadline) {
        this.#socket.send(encode(message)).catch(() => {}); // nobody is there yet: the next time, perhaps
        const left = () => Math.min(this.answerSeconds * 1000, deadline - Date.now());
        for (let reply; (reply = await inbox.take(left())) !== null; ) {
          if (reply.type === "refusal") this.#fail(reply.code, reply.text, reply.lead);
          if (isLast(reply)) return reply;
          isAnswered = true;
        }
        if (!isAnswered && message.id) console.error(`${this.address} is silent: asking again under id ${message.id}`);
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

/** Replies that have come and are not taken yet. */
class Inbox {
  #items = [];
  #wake = () => {};

  put(item) {
    this.#items.push(item);
    this.#wake();
  }

  /** The next one, or null after so many milliseconds. */
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

/** A DEALER with the settings that the protocol asks for. */
function newSocket(keys, sendSeconds) {
  return new Dealer({
    linger: 0, // and no routingId: the agent's side makes one up that nobody else can take
    immediate: true, // nothing is kept for an agent that starts an hour later
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
