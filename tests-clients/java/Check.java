// Drives a router with Jedis: types, pipelines, transactions with WATCH, blocking commands, pub/sub, scripts, many threads on one pool, both
// protocols, and JedisCluster if a second address is given. See ../README.md.

import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.Set;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicReference;
import redis.clients.jedis.*;
import redis.clients.jedis.args.ListDirection;
import redis.clients.jedis.exceptions.JedisDataException;
import redis.clients.jedis.params.ScanParams;
import redis.clients.jedis.params.SetParams;
import redis.clients.jedis.resps.ScanResult;
import redis.clients.jedis.resps.Tuple;
import redis.clients.jedis.util.KeyValue;

public class Check {
    static final AtomicInteger checks = new AtomicInteger();

    static void expect(String what, Object wanted, Object got) {
        if (!Objects.equals(wanted, got)) {
            throw new AssertionError(what + ": got " + got + ", wanted " + wanted);
        }
        checks.incrementAndGet();
    }

    static void types(Jedis r) {
        expect("FLUSHALL", "OK", r.flushAll());
        expect("PING", "PONG", r.ping());
        expect("SET EX", "OK", r.set("k", "v", SetParams.setParams().ex(1000)));
        expect("GET", "v", r.get("k"));
        expect("GET of nothing", null, r.get("none"));
        expect("SET NX", null, r.set("k", "w", SetParams.setParams().nx()));
        expect("INCRBY", 5L, r.incrBy("n", 5));
        String[] pairs = new String[200], keys = new String[100];
        List<String> values = new ArrayList<>();
        for (int i = 0; i < 100; i++) {
            pairs[2 * i] = keys[i] = "m" + i;
            pairs[2 * i + 1] = "" + i;
            values.add("" + i);
        }
        expect("MSET over nodes", "OK", r.mset(pairs));
        expect("MGET over nodes", values, r.mget(keys));
        expect("EXISTS over nodes", 100L, r.exists(keys));
        expect("DEL over nodes", 100L, r.del(keys));
        expect("HSET", 2L, r.hset("h", Map.of("a", "1", "b", "2")));
        expect("HGETALL", Map.of("a", "1", "b", "2"), r.hgetAll("h"));
        expect("RPUSH", 3L, r.rpush("l", "1", "2", "3"));
        expect("LRANGE", List.of("1", "2", "3"), r.lrange("l", 0, -1));
        expect("SMISMEMBER", List.of(false, false), r.smismember("s", "x", "z"));
        expect("ZADD", 2L, r.zadd("z", Map.of("a", 1.0, "b", 2.5)));
        expect("ZRANGE WITHSCORES", List.of(new Tuple("a", 1.0), new Tuple("b", 2.5)), r.zrangeWithScores("z", 0, -1));
        expect("EVAL", List.of("{t}k", "x"), r.eval("return {KEYS[1], ARGV[1]}", List.of("{t}k"), List.of("x")));
        String sha = r.scriptLoad("return redis.call('INCR', KEYS[1])");
        expect("EVALSHA", 1L, r.evalsha(sha, List.of("script:n"), List.of()));
        try {
            r.lpush("k", "y");
            throw new AssertionError("LPUSH on a string succeeded");
        } catch (JedisDataException error) {
            expect("LPUSH on a string", true, error.getMessage().startsWith("WRONGTYPE"));
        }
        Set<String> seen = new HashSet<>();
        String cursor = ScanParams.SCAN_POINTER_START;
        for (int i = 0; i < 500; i++) {
            r.set("scan:" + i, "x");
        }
        do {
            ScanResult<String> page = r.scan(cursor, new ScanParams().match("scan:*").count(50));
            seen.addAll(page.getResult());
            cursor = page.getCursor();
        } while (!cursor.equals(ScanParams.SCAN_POINTER_START));
        expect("keys that SCAN gives", 500, seen.size());
    }

    static void pipelines(Jedis r) {
        Pipeline pipeline = r.pipelined();
        List<Response<String>> got = new ArrayList<>();
        for (int i = 0; i < 3000; i++) {
            pipeline.set("pipe" + i, "" + i);
            got.add(pipeline.get("pipe" + i));
        }
        pipeline.sync();
        for (int i = 0; i < 3000; i++) {
            expect("GET of a pipeline", "" + i, got.get(i).get());
        }
    }

    static void transactions(JedisPool pool) throws Exception {
        try (Jedis r = pool.getResource(); Jedis other = pool.getResource()) {
            Transaction transaction = r.multi();
            Response<Long> counted = transaction.incr("{tx}n");
            transaction.set("{tx}k", "v");
            Response<String> value = transaction.get("{tx}k");
            expect("EXEC", 3, transaction.exec().size());
            expect("INCR in MULTI", 1L, counted.get());
            expect("GET in MULTI", "v", value.get());

            expect("WATCH", "OK", r.watch("{tx}n"));
            other.incr("{tx}n");
            transaction = r.multi();
            transaction.set("{tx}k", "lost");
            expect("EXEC after a change", null, transaction.exec());
            expect("what it did not write", "v", r.get("{tx}k"));

            transaction = r.multi();
            transaction.set("{tx}k", "never");
            expect("DISCARD", "OK", transaction.discard());
            expect("what it did not write", "v", r.get("{tx}k"));
        }
        // Many clients increment a counter by WATCH and MULTI: no increment is lost or counted twice.
        int threads = 8, each = 20;
        parallel(threads, number -> {
            try (Jedis r = pool.getResource()) {
                for (int done = 0; done < each;) {
                    r.watch("{cas}n");
                    String now = r.get("{cas}n");
                    Transaction attempt = r.multi();
                    attempt.set("{cas}n", "" + (now == null ? 1 : Integer.parseInt(now) + 1));
                    if (attempt.exec() != null) {
                        done++;
                    }
                }
            }
        });
        try (Jedis r = pool.getResource()) {
            expect("compare and set by many", "" + threads * each, r.get("{cas}n"));
        }
    }

    static void blocking(JedisPool pool) throws Exception {
        try (Jedis r = pool.getResource()) {
            expect("BLPOP of nothing", null, r.blpop(0.05, "queue:none"));
        }
        int consumers = 10, items = 200;
        Map<String, Integer> taken = new HashMap<>();
        CountDownLatch ready = new CountDownLatch(consumers);
        Thread producer = new Thread(() -> {
            try (Jedis r = pool.getResource()) {
                ready.await();
                for (int i = 0; i < items; i++) {
                    r.rpush("queue:" + i % 5, "item" + i);
                }
                for (int i = 0; i < consumers; i++) {
                    r.rpush("queue:" + i % 5, "end");
                }
            } catch (InterruptedException stop) {
                Thread.currentThread().interrupt();
            }
        });
        producer.start();
        parallel(consumers, number -> {
            try (Jedis r = pool.getResource()) {
                ready.countDown();
                while (true) {
                    KeyValue<String, String> item = r.blpop(10.0, "queue:" + number % 5);
                    expect("a queue is not forgotten", true, item != null);
                    if (item.getValue().equals("end")) {
                        return;
                    }
                    synchronized (taken) {
                        taken.merge(item.getValue(), 1, Integer::sum);
                    }
                }
            }
        });
        producer.join();
        expect("items taken", items, taken.size());
        expect("items taken twice", true, taken.values().stream().allMatch(n -> n == 1));
        try (Jedis r = pool.getResource()) {
            r.rpush("{move}a", "x");
            expect("BLMOVE", "x", r.blmove("{move}a", "{move}b", ListDirection.LEFT, ListDirection.RIGHT, 1));
        }
    }

    static void pubsub(JedisPool pool) throws Exception {
        BlockingQueue<String> heard = new LinkedBlockingQueue<>();
        CountDownLatch subscribed = new CountDownLatch(3);
        JedisPubSub listener = new JedisPubSub() {
            @Override public void onMessage(String channel, String message) { heard.add(channel + "=" + message); }
            @Override public void onPMessage(String pattern, String channel, String message) { heard.add(pattern + "/" + channel + "=" + message); }
            @Override public void onSubscribe(String channel, int count) { subscribed.countDown(); }
            @Override public void onPSubscribe(String pattern, int count) { subscribed.countDown(); }
        };
        Thread thread = new Thread(() -> {
            try (Jedis r = pool.getResource()) {
                r.subscribe(listener, "news", "sport");
            }
        });
        thread.start();
        JedisPubSub patterns = new JedisPubSub() {
            @Override public void onPMessage(String pattern, String channel, String message) { heard.add(pattern + "/" + channel + "=" + message); }
            @Override public void onPSubscribe(String pattern, int count) { subscribed.countDown(); }
        };
        Thread second = new Thread(() -> {
            try (Jedis r = pool.getResource()) {
                r.psubscribe(patterns, "n*");
            }
        });
        second.start();
        expect("subscriptions in force", true, subscribed.await(10, TimeUnit.SECONDS));
        try (Jedis r = pool.getResource()) {
            expect("PUBLISH to a channel and a pattern", 2L, r.publish("news", "a"));
            expect("PUBLISH to a channel", 1L, r.publish("sport", "b"));
            expect("PUBLISH to nobody", 0L, r.publish("weather", "c"));
        }
        Set<String> messages = new HashSet<>();
        for (int i = 0; i < 3; i++) {
            messages.add(heard.poll(10, TimeUnit.SECONDS));
        }
        expect("messages", Set.of("news=a", "n*/news=a", "sport=b"), messages);
        listener.unsubscribe();
        patterns.punsubscribe();
        thread.join(10_000);
        second.join(10_000);
        expect("subscribers ended", false, thread.isAlive() || second.isAlive());
    }

    interface Work { void run(int number) throws Exception; }

    static void parallel(int threads, Work work) throws Exception {
        AtomicReference<Throwable> failure = new AtomicReference<>();
        List<Thread> all = new ArrayList<>();
        for (int i = 0; i < threads; i++) {
            int number = i;
            Thread thread = new Thread(() -> {
                try {
                    work.run(number);
                } catch (Throwable error) {
                    failure.compareAndSet(null, error);
                }
            });
            thread.start();
            all.add(thread);
        }
        for (Thread thread : all) {
            thread.join();
        }
        if (failure.get() != null) {
            throw new AssertionError("one of " + threads + " threads failed", failure.get());
        }
    }

    static void threads(JedisPool pool) throws Exception {
        parallel(16, number -> {
            for (int i = 0; i < 50; i++) {
                try (Jedis r = pool.getResource()) {
                    String key = "thread:" + number + ":" + i;
                    r.set(key, key);
                    expect("a value of one's own", key, r.get(key));
                }
            }
        });
    }

    public static void main(String[] args) throws Exception {
        HostAndPort address = HostAndPort.from(args[0]);
        for (RedisProtocol protocol : List.of(RedisProtocol.RESP2, RedisProtocol.RESP3)) {
            JedisClientConfig config = DefaultJedisClientConfig.builder().protocol(protocol).clientName("check").timeoutMillis(20_000).build();
            JedisPoolConfig limits = new JedisPoolConfig();
            limits.setMaxTotal(32);
            try (JedisPool pool = new JedisPool(limits, address, config)) {
                try (Jedis r = pool.getResource()) {
                    types(r);
                    pipelines(r);
                }
                transactions(pool);
                blocking(pool);
                pubsub(pool);
                threads(pool);
            }
        }
        if (args.length > 1) {
            try (JedisCluster cluster = new JedisCluster(HostAndPort.from(args[1]))) {
                for (int i = 0; i < 200; i++) {
                    cluster.set("cluster:" + i, "" + i);
                    expect("GET of a cluster", "" + i, cluster.get("cluster:" + i));
                }
            }
        }
        System.out.println("ok: " + checks.get() + " checks");
    }
}
