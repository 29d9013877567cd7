// Finds a script's keys: $TRAINCTL_PUBLIC_KEY and $TRAINCTL_SECRET_KEY, or the file made by `trainctl keys new`.

import { readFileSync } from "node:fs";
import { homedir, platform } from "node:os";
import { join } from "node:path";

/** The folder of this machine's keys, as trainctl itself finds it. */
export function keysFolder() {
  if (process.env.TRAINCTL_KEYS) return process.env.TRAINCTL_KEYS;
  const config = platform() === "darwin" ? join(homedir(), "Library", "Application Support") : (process.env.XDG_CONFIG_HOME ?? join(homedir(), ".config"));
  return join(config, "trainctl", "keys");
}

/** {publicKey, secretKey, serverKey} for an agent whose public key is `serverKey`. Throws if the script has no key pair. */
export function keysFor(serverKey) {
  const { TRAINCTL_PUBLIC_KEY: publicKey, TRAINCTL_SECRET_KEY: secretKey } = process.env;
  return { ...(publicKey && secretKey ? { publicKey, secretKey } : readPair(join(keysFolder(), "user.toml"))), serverKey };
}

/** The public key of this machine's own agent. */
export function ownAgentKey() {
  return readPair(join(keysFolder(), "agent.toml")).publicKey;
}

/** Reads two lines of a key file: public = "..." and secret = "...", 40 characters of Z85 each. */
function readPair(path) {
  const text = readFileSync(path, "utf8");
  const [publicKey, secretKey] = ["public", "secret"].map((name) => text.match(new RegExp(`^${name} *= *["'](\\S{40})["']$`, "m"))?.[1]);
  if (!publicKey || !secretKey) throw new Error(`${path}: no public and secret key in this file; make them with trainctl keys new`);
  return { publicKey, secretKey };
}
