// Measures BullMQ: adds jobs to queues in bulk while workers complete them, and prints jobs and seconds as JSON.
// Usage: node bullmq_speed.mjs HOST:PORT FIRST_QUEUE QUEUES JOBS plain|braces
import { Queue, Worker } from "bullmq";

const [address, first, count, jobs, names] = process.argv.slice(2);
const [host, port] = address.split(":");
const connection = { host, port: Number(port), maxRetriesPerRequest: null };
const BULK = 100;
const CONCURRENCY = 16;

const queues = Array.from({ length: Number(count) }, (_, i) => {
  const name = `q${Number(first) + i}`;
  const options = { connection, prefix: names === "braces" ? `{${name}}` : "bull" };
  return { name, options, queue: new Queue(name, options) };
});
await Promise.all(queues.map(({ queue }) => queue.waitUntilReady()));
const each = Math.ceil(Number(jobs) / queues.length);

async function run({ name, options, queue }) {
  let completed = 0;
  const worker = new Worker(name, async (job) => job.data.n, { ...options, concurrency: CONCURRENCY });
  const done = new Promise((resolve, reject) => {
    worker.on("completed", () => ++completed === each && resolve());
    worker.on("failed", (_, error) => reject(error));
  });
  for (let added = 0; added < each; added += BULK) {
    const size = Math.min(BULK, each - added);
    await queue.addBulk(Array.from({ length: size }, (_, n) => ({ name: "job", data: { n: added + n } })));
  }
  await done;
  await worker.close();
  const counts = await queue.getJobCounts("completed", "wait", "active", "failed");
  if (counts.completed !== each) {
    throw new Error(`${counts.completed} of ${each} jobs of ${name} are completed`);
  }
  await queue.close();
}

const begun = performance.now();
await Promise.all(queues.map(run));
console.log(JSON.stringify({ jobs: each * queues.length, seconds: (performance.now() - begun) / 1000 }));
