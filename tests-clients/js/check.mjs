// Checks node-redis and ioredis at an address: connection set-up in both protocols, pipelines, multi-key commands, scripts,
// iteration, types. See ../README.md.

import assert from "node:assert/strict";
import { createClient, defineScript } from "redis";
import Redis from "ioredis";

const [host, port] = process.argv[2].split(":");
let checks = 0;

function expect(got, wanted, what) {
  assert.deepEqual(got, wanted, what);
  checks += 1;
}

const numbers = (n) => Array.from({ length: n }, (_, i) => i);
// node-redis returns maps without a prototype.
const plain = (map) => ({ ...map });

async function nodeRedis(RESP) {
  const add = defineScript({
    SCRIPT: "return redis.call('INCRBY', KEYS[1], ARGV[1])",
    NUMBER_OF_KEYS: 1,
    parseCommand(parser, key, by) {
      parser.pushKey(key);
      parser.push(by.toString());
    },
    transformReply: (reply) => reply,
  });
  const r = createClient({ url: `redis://${host}:${port}`, RESP, name: "check", scripts: { add } });
  r.on("error", (error) => {
    console.error("node-redis:", error);
    process.exit(1);
  });
  await r.connect();
  await r.flushAll();
  expect(await r.ping(), "PONG", "PING");
  expect(await r.set("k", "v", { expiration: { type: "EX", value: 1000 } }), "OK", "SET EX");
  expect(await r.get("k"), "v", "GET");
  expect(await r.get("none"), null, "GET of nothing");
  expect(await r.incrBy("n", 5), 5, "INCRBY");
  expect(await r.mSet(Object.fromEntries(numbers(100).map((i) => [`m${i}`, `${i}`]))), "OK", "MSET over nodes");
  expect(await r.mGet([...numbers(100).map((i) => `m${i}`), "none"]), [...numbers(100).map(String), null], "MGET over nodes");
  expect(await r.exists(["m1", "m2", "none"]), 2, "EXISTS over nodes");
  expect(await r.del(["m1", "m2", "none"]), 2, "DEL over nodes");
  expect(await r.hSet("h", { a: 1, b: 2 }), 2, "HSET");
  expect(plain(await r.hGetAll("h")), { a: "1", b: "2" }, "HGETALL");
  expect(await r.zAdd("z", [{ score: 1, value: "a" }, { score: 2.5, value: "b" }]), 2, "ZADD");
  expect(await r.zRangeWithScores("z", 0, -1), [{ score: 1, value: "a" }, { score: 2.5, value: "b" }], "ZRANGE WITHSCORES");
  expect(await r.rPush("l", ["1", "2", "3"]), 3, "RPUSH");
  expect(await r.lRange("l", 0, -1), ["1", "2", "3"], "LRANGE");
  expect(await r.xAdd("x", "1-1", { f: "v" }), "1-1", "XADD");
  const entries = (await r.xRange("x", "-", "+")).map(({ id, message }) => [id, plain(message)]);
  expect(entries, [["1-1", { f: "v" }]], "XRANGE");
  await assert.rejects(r.lPush("k", "x"), /WRONGTYPE/);
  // Commands sent without waiting form one pipeline.
  const together = await Promise.all(numbers(3000).flatMap((i) => [r.set(`pipe${i}`, `${i}`), r.get(`pipe${i}`)]));
  expect(together.filter((_, i) => i % 2), numbers(3000).map(String), "GETs of a pipeline");
  expect(await Promise.all(numbers(30).map((i) => r.add(`script${i}`, i))), numbers(30), "scripts");
  const sha = await r.scriptLoad("return ARGV[1]");
  for (const i of numbers(20)) {
    expect(await r.evalSha(sha, { keys: [`key${i}`], arguments: ["hello"] }), "hello", "EVALSHA at every node");
  }
  expect(await r.multi().set("{t}a", "1").incr("{t}a").get("{t}a").exec(), ["OK", 2, "2"], "a transaction");
  const overSlots = r.multi().set("a", "1").set("b", "2").exec();
  if (process.env.SINGLE_DATABASE) {
    await assert.rejects(overSlots, /CROSSSLOT|EXECABORT|aborted/i);
  } else {
    expect(await overSlots, ["OK", "OK"], "a transaction over several nodes");
  }
  const watcher = r.duplicate();
  await watcher.connect();
  await watcher.watch("{t}a");
  await r.set("{t}a", "changed");
  await assert.rejects(watcher.multi().set("{t}a", "lost").exec(), /watched keys|null/i);
  const waiting = watcher.blPop("{q}l", 10);
  await r.rPush("{q}l", "element");
  expect(plain(await waiting), { key: "{q}l", element: "element" }, "BLPOP");
  expect(await watcher.blPop("{q}l", 0.02), null, "BLPOP of nothing");
  await watcher.close();
  await r.flushDb();
  await Promise.all(numbers(3000).map((i) => r.set(`scan:${i}`, "x")));
  const seen = [];
  for await (const batch of r.scanIterator({ MATCH: "scan:*", COUNT: 250 })) {
    seen.push(...batch);
  }
  expect([seen.length, new Set(seen).size], [3000, 3000], "SCAN gives each key once");
  expect(await r.dbSize(), 3000, "DBSIZE");
  expect(await r.clientGetName(), "check", "CLIENT GETNAME");
  expect((await r.info("server")).includes("redis_version"), true, "INFO");
  const binary = Buffer.from([0, 13, 10, 255, 36]);
  await r.set("binary", binary);
  expect(Buffer.from(await r.sendCommand(["GETRANGE", "binary", "1", "2"])).toString(), "\r\n", "bytes");
  if (!process.env.SINGLE_DATABASE) {
    const other = r.duplicate({ database: 5 });
    await other.connect();
    await other.set("five", "5");
    expect(await r.exists("five"), 0, "another database");
    await other.close();
  }
  await r.flushAll();
  await r.close();
}

async function ioRedis() {
  const r = new Redis({ host, port: Number(port), connectionName: "check", retryStrategy: null, maxRetriesPerRequest: 0 });
  // On connection the library sends INFO, and waits while "loading" is set.
  await new Promise((resolve, reject) => r.once("ready", resolve).once("error", reject));
  await r.flushall();
  expect(await r.set("k", "v"), "OK", "SET");
  expect(await r.mset(...numbers(50).flatMap((i) => [`m${i}`, i])), "OK", "MSET over nodes");
  expect(await r.mget(...numbers(50).map((i) => `m${i}`)), numbers(50).map(String), "MGET over nodes");
  expect(await r.hset("h", { a: 1, b: 2 }), 2, "HSET");
  expect(await r.hgetall("h"), { a: "1", b: "2" }, "HGETALL");
  const pipeline = r.pipeline();
  for (const i of numbers(3000)) {
    pipeline.set(`pipe${i}`, i).get(`pipe${i}`);
  }
  const got = await pipeline.exec();
  expect(got.every(([error]) => error === null), true, "errors of a pipeline");
  expect(got.filter((_, i) => i % 2).map(([, value]) => value), numbers(3000).map(String), "GETs of a pipeline");
  r.defineCommand("add", { numberOfKeys: 1, lua: "return redis.call('INCRBY', KEYS[1], ARGV[1])" });
  for (const i of numbers(30)) {
    expect(await r.add(`script${i}`, i), i, "a defined command");
  }
  expect(await r.multi().set("{t}a", "1").incr("{t}a").exec(), [[null, "OK"], [null, 2]], "a transaction");
  expect(await r.multi({ pipeline: false }), "OK", "MULTI");
  await r.set("{t}a", "5");
  expect(await r.exec(), [[null, "OK"]], "EXEC");
  const blocked = r.duplicate();
  const popped = blocked.blpop("{q}l", 10);
  await r.rpush("{q}l", "element");
  expect(await popped, ["{q}l", "element"], "BLPOP");
  blocked.disconnect();
  await r.flushdb();
  await Promise.all(numbers(2000).map((i) => r.set(`scan:${i}`, "x")));
  const seen = [];
  for await (const batch of r.scanStream({ match: "scan:*", count: 200 })) {
    seen.push(...batch);
  }
  expect([seen.length, new Set(seen).size], [2000, 2000], "SCAN gives each key once");
  expect(await r.getBuffer("none"), null, "GET of nothing");
  await r.flushall();
  expect(await r.quit(), "OK", "QUIT");
}

await nodeRedis(2);
await nodeRedis(3);
await ioRedis();
console.log(`ok: ${checks} checks with node-redis and ioredis`);
