// Prints the active run, moves samples between its nodes, and prints the step at which that took effect.
//
//   node steer.mjs studio=16 mbp=8
//   node steer.mjs --connect tcp://studio:7474 --server-key 'Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID' mbp=30%
//
// Exit codes are those of `trainctl send`: 0 applied, 2 usage, 3 rejected or failed, 4 expired, 5 unreachable,
// 6 not authorised.

import { parseArgs } from "node:util";
import { keysFor, ownAgentKey } from "./keys.mjs";
import { Client, localAgent, TrainctlError } from "./trainctl.mjs";

const USAGE = "usage: node steer.mjs [--connect ADDRESS] [--server-key KEY | --own-agent] [--id UUID] NODE=SHARE ...";

/** Prints the status, rebalances if the plan is still the same, prints the outcome, sets the exit code. */
async function main() {
  const { options, shares } = given();
  const serverKey = options["own-agent"] ? ownAgentKey() : options["server-key"];
  const keys = serverKey ? keysFor(serverKey) : null;
  const client = new Client(options.connect ?? localAgent(), { by: "steer.mjs", keys, answerSeconds: Number(options.answer) });
  try {
    const { run } = await client.ask("snapshot-request", { columns: 0 });
    if (!run) throw new TrainctlError("no-run", "no run yet");
    console.log(`${run.run} ${run.state}, step ${run.step}/${run.steps}, plan ${run.plan_version}, batch ${run.global_batch}`);
    for (const rank of run.ranks) console.log(`  ${rank.node} ${rank.state}: ${rank.share} samples`);
    // A given id repeats an earlier command, whose plan version may have been different.
    const reply = await client.send("rebalance", { shares }, options.id ? { id: options.id } : { ifPlan: run.plan_version });
    return told(reply);
  } finally {
    client.close();
  }
}

/** Prints how the command ended, with its step or the reason; returns the exit code. */
function told({ state, step, before, after, field, reason }) {
  if (state === "applied") {
    console.log(`rebalance applied at step ${step}: ${before} -> ${after}`);
    return 0;
  }
  console.error(`steer.mjs: rebalance ${state}: ${field ? `${field}: ` : ""}${reason}`);
  return state === "expired" ? 4 : 3;
}

/** The options, and each node's share as the verb expects it: samples, or a percentage as text. */
function given() {
  const { values, positionals } = parseArgs({
    allowPositionals: true,
    options: {
      connect: { type: "string", default: process.env.TRAINCTL_CONNECT },
      "server-key": { type: "string", default: process.env.TRAINCTL_SERVER_KEY },
      "own-agent": { type: "boolean", default: false }, // use this machine's agent and its key
      answer: { type: "string", default: "5" }, // seconds without an answer before a retry
      id: { type: "string" },
    },
  });
  const pairs = positionals.map((word) => word.match(/^([^=]+)=(\d+%?|\d+\.\d+%)$/));
  if (pairs.length === 0 || pairs.includes(null)) throw new TrainctlError("usage", USAGE);
  return { options: values, shares: Object.fromEntries(pairs.map(([, node, share]) => [node, share.endsWith("%") ? share : Number(share)])) };
}

try {
  process.exitCode = await main();
} catch (error) {
  const isUsage = error.code?.startsWith("ERR_PARSE_ARGS");
  console.error(`steer.mjs: ${error.message}${isUsage ? `; ${USAGE}` : ""}`);
  process.exitCode = error.exitCode ?? 2; // no exitCode: an invalid option or key file
}
