// Checks the cluster clients of ioredis and node-redis with a router that looks like a cluster (`--cluster`). See ../README.md.

import assert from "node:assert/strict";
import { createCluster } from "redis";
import Redis from "ioredis";

const [host, port] = process.argv[2].split(":");
let checks = 0;

function expect(got, wanted, what) {
  assert.deepEqual(got, wanted, what);
  checks += 1;
}

const numbers = (n) => Array.from({ length: n }, (_, i) => i);

async function ioRedis() {
  const r = new Redis.Cluster([{ host, port: Number(port) }]);
  await new Promise((resolve, reject) => {
    r.once("ready", resolve);
    r.once("error", reject);
  });
  expect(r.nodes("master").length, 1, "one member");
  await r.flushall();
  for (const i of numbers(60)) {
    expect(await r.set(`k${i}`, i), "OK", "SET");
    expect(await r.get(`k${i}`), String(i), "GET");
  }
  expect(await r.mget("{t}a", "{t}b"), [null, null], "MGET in a slot");
  const pipeline = r.pipeline();
  numbers(20).forEach((i) => pipeline.incr(`{p}${i}`));
  expect((await pipeline.exec()).map(([error, value]) => error ?? value), numbers(20).map(() => 1), "a pipeline");
  expect(await r.eval("return redis.call('INCRBY', KEYS[1], ARGV[1])", 1, "n", 5), 5, "EVAL");
  expect(await r.flushall(), "OK", "FLUSHALL");
  await r.quit();
}

async function nodeRedis() {
  const r = createCluster({ rootNodes: [{ url: `redis://${host}:${port}` }] });
  r.on("error", (error) => {
    console.error("node-redis:", error);
    process.exit(1);
  });
  await r.connect();
  for (const i of numbers(60)) {
    expect(await r.set(`n${i}`, String(i)), "OK", "SET");
    expect(await r.get(`n${i}`), String(i), "GET");
  }
  expect(await r.del("n1"), 1, "DEL");
  expect(await r.eval("return redis.call('INCRBY', KEYS[1], ARGV[1])", { keys: ["m"], arguments: ["5"] }), 5, "EVAL");
  await r.destroy();
}

await ioRedis();
await nodeRedis();
console.log(`ok: ${checks} checks with ioredis and node-redis (cluster)`);
