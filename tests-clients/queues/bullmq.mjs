// Runs BullMQ and Bull on several queues behind a router with the presets of these libraries.
// Usage: node bullmq.mjs HOST:PORT
import assert from "node:assert/strict";
import Bull from "bull";
import { FlowProducer, Queue, QueueEvents, Worker } from "bullmq";

const [host, port] = process.argv[2].split(":");
const connection = { host, port: Number(port), maxRetriesPerRequest: null };
const QUEUES = 8;
const JOBS = 20;
let checks = 0;

function equal(actual, expected, what) {
  assert.deepEqual(actual, expected, what);
  checks += 1;
}

async function bullmq(name) {
  const queue = new Queue(name, { connection });
  const events = new QueueEvents(name, { connection });
  await events.waitUntilReady();
  let failures = 0;
  const worker = new Worker(
    name,
    async (job) => {
      if (job.name === "flaky" && job.attemptsMade === 0) {
        failures += 1;
        throw new Error("first attempt");
      }
      return job.data.n * 2;
    },
    { connection, concurrency: 4 },
  );
  const jobs = await queue.addBulk(Array.from({ length: JOBS }, (_, n) => ({ name: "plain", data: { n } })));
  jobs.push(await queue.add("delayed", { n: JOBS }, { delay: 300 }));
  jobs.push(await queue.add("urgent", { n: JOBS + 1 }, { priority: 1 }));
  jobs.push(await queue.add("flaky", { n: JOBS + 2 }, { attempts: 2, backoff: 50 }));
  for (const job of jobs) {
    equal(await job.waitUntilFinished(events, 60000), job.data.n * 2, `${name} ${job.name}`);
  }
  equal(failures, 1, "the failed job is retried");
  const flow = new FlowProducer({ connection });
  const children = [1, 2, 3].map((n) => ({ name: "child", queueName: name, data: { n } }));
  const tree = await flow.add({ name: "parent", queueName: name, data: { n: 9 }, children });
  equal(await tree.job.waitUntilFinished(events, 60000), 18, "a parent runs after its children");
  equal(Object.values(await tree.job.getChildrenValues()).sort(), [2, 4, 6], "children have values");
  const counts = await queue.getJobCounts("completed", "failed", "wait", "active", "delayed", "waiting-children");
  const done = jobs.length + 4;
  equal(counts, { completed: done, failed: 0, wait: 0, active: 0, delayed: 0, "waiting-children": 0 }, "counts");
  await worker.close();
  await queue.pause();
  await queue.add("plain", { n: 1 });
  equal(await queue.isPaused(), true, "a paused queue");
  await queue.resume();
  equal((await queue.getWaiting()).length, 1, "a waiting job");
  await queue.obliterate({ force: true });
  equal(await queue.count(), 0, "an obliterated queue");
  await Promise.all([flow.close(), events.close(), queue.close()]);
}

async function bull(name) {
  const queue = new Bull(name, { redis: connection });
  queue.process(4, async (job) => job.data.n * 2);
  const jobs = await queue.addBulk(Array.from({ length: JOBS }, (_, n) => ({ data: { n } })));
  jobs.push(await queue.add({ n: JOBS }, { delay: 200 }));
  for (const job of jobs) {
    equal(await job.finished(), job.data.n * 2, `${name} ${job.id}`);
  }
  equal((await queue.getJobCounts()).completed, jobs.length, "counts of Bull");
  await queue.pause();
  await queue.add({ n: 1 });
  // Not `empty`, which sends KEYS inside MULTI.
  await queue.obliterate({ force: true });
  equal((await queue.getJobCounts()).paused, 0, "an obliterated queue of Bull");
  await queue.close();
}

const names = (library) => Array.from({ length: QUEUES }, (_, i) => `${library}${i}`);
await Promise.all([...names("mq").map(bullmq), ...names("bull").map(bull)]);
console.log(`ok: ${checks} checks`);
