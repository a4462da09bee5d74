"""Checks redis-py at an address: connection set-up in both protocols, pipelines, multi-key commands, scripts, iteration, types."""

import os
import sys
import threading
import time

import redis
from redis.backoff import NoBackoff
from redis.cache import CacheConfig
from redis.retry import Retry

checks = 0
# No retries: the library repeats even a wrong password, and after twenty of them the router refuses the address for a while.
ONCE = {"retry": Retry(NoBackoff(), 0)}
# Address and settings of every connection.
where = {}
is_single_database = "SINGLE_DATABASE" in os.environ
# Another database than 0, if there are several.
database = 0 if is_single_database else 3


def expect(got, wanted, what):
    global checks
    if got != wanted:
        raise SystemExit(f"{what}: got {got!r}, wanted {wanted!r}")
    checks += 1


def fails_with(kind, text, call, what):
    global checks
    try:
        got = call()
    except kind as error:
        if text not in str(error):
            raise SystemExit(f"{what}: the error lacks {text!r}: {error}")
        checks += 1
        return
    raise SystemExit(f"{what}: no error but {got!r}")


def types(r, protocol):
    r.flushall()
    expect(r.ping(), True, "PING")
    expect(r.set("k", "v", ex=1000), True, "SET EX")
    expect(r.get("k"), "v", "GET")
    expect(0 < r.ttl("k") <= 1000, True, "TTL")
    expect(r.get("none"), None, "GET of nothing")
    expect(r.set("k", "w", nx=True), None, "SET NX")
    expect(r.incrby("n", 5), 5, "INCRBY")
    expect(r.incrbyfloat("f", 1.5), 1.5, "INCRBYFLOAT")
    expect(r.append("k", "x"), 2, "APPEND")
    expect(r.getrange("k", 0, 0), "v", "GETRANGE")

    expect(r.mset({f"m{i}": i for i in range(100)}), True, "MSET over nodes")
    expect(r.mget([f"m{i}" for i in range(101)]), [str(i) for i in range(100)] + [None], "MGET over nodes")
    expect(r.exists("m1", "m2", "none"), 2, "EXISTS over nodes")
    expect(r.touch("m1", "m2"), 2, "TOUCH over nodes")
    expect(r.delete("m1", "m2", "none"), 2, "DEL over nodes")
    expect(r.unlink("m3", "m4"), 2, "UNLINK over nodes")
    expect(r.msetnx({"{t}a": 1, "{t}b": 2}), True, "MSETNX in a slot")

    expect(r.hset("h", mapping={"a": 1, "b": 2}), 2, "HSET")
    expect(r.hgetall("h"), {"a": "1", "b": "2"}, "HGETALL")
    expect(r.hmget("h", "a", "none"), ["1", None], "HMGET")
    expect(dict(r.hscan_iter("h")), {"a": "1", "b": "2"}, "HSCAN")
    expect(r.rpush("l", 1, 2, 3), 3, "RPUSH")
    expect(r.lrange("l", 0, -1), ["1", "2", "3"], "LRANGE")
    expect(r.lmove("{l}1", "{l}2"), None, "LMOVE of nothing")
    expect(r.sort("l", desc=True), ["3", "2", "1"], "SORT")
    expect(r.sadd("s", "x", "y"), 2, "SADD")
    expect(set(r.smembers("s")), {"x", "y"}, "SMEMBERS")
    expect(set(r.sscan_iter("s")), {"x", "y"}, "SSCAN")
    expect(r.zadd("z", {"a": 1, "b": 2.5}), 2, "ZADD")
    expect([tuple(pair) for pair in r.zrange("z", 0, -1, withscores=True)], [("a", 1.0), ("b", 2.5)], "ZRANGE WITHSCORES")
    expect(r.zscore("z", "b"), 2.5, "ZSCORE")
    expect(r.xadd("x", {"f": "v"}, id="1-1"), "1-1", "XADD")
    expect(r.xlen("x"), 1, "XLEN")
    expect(r.xrange("x"), [("1-1", {"f": "v"})], "XRANGE")
    expect(r.xgroup_create("x", "g", 0), True, "XGROUP CREATE")
    # The library's form of this reply differs between protocols; the content does not.
    delivered = r.xreadgroup("g", "c", {"x": ">"})
    expect("1-1" in str(delivered) and "'f': 'v'" in str(delivered), True, f"XREADGROUP: {delivered}")
    expect(r.xack("x", "g", "1-1"), 1, "XACK")
    expect(r.pfadd("p", 1, 2, 3), 1, "PFADD")
    expect(r.pfcount("p"), 3, "PFCOUNT")
    expect(r.setbit("b", 7, 1), 0, "SETBIT")
    expect(r.bitcount("b"), 1, "BITCOUNT")
    expect(r.geoadd("g", (13.361389, 38.115556, "Palermo")), 1, "GEOADD")
    expect(r.geosearch("g", longitude=13, latitude=38, radius=100, unit="km"), ["Palermo"], "GEOSEARCH")
    raw = redis.Redis(**where, protocol=protocol)
    expect(bool(raw.restore("h2", 0, raw.dump("h"))), True, "DUMP and RESTORE")
    expect(r.hgetall("h2"), {"a": "1", "b": "2"}, "HGETALL of the restored")

    fails_with(redis.ResponseError, "WRONGTYPE", lambda: r.lpush("k", 1), "LPUSH on a string")
    fails_with(redis.ResponseError, "not an integer", lambda: r.incr("k"), "INCR of a text")


def pipelines(r):
    pipe = r.pipeline(transaction=False)
    for i in range(5000):
        pipe.set(f"pipe{i}", i)
        pipe.get(f"pipe{i}")
    got = pipe.execute()
    expect(got[0::2], [True] * 5000, "SETs of a pipeline")
    expect(got[1::2], [str(i) for i in range(5000)], "GETs of a pipeline")
    pipe = r.pipeline(transaction=False)
    pipe.set("a", 1).lpush("a", 2).get("a")
    got = pipe.execute(raise_on_error=False)
    expect((got[0], isinstance(got[1], redis.ResponseError), got[2]), (True, True, "1"), "an error inside a pipeline")


def iteration(r):
    r.flushdb()
    for i in range(0, 3000, 100):
        r.mset({f"scan:{n}": n for n in range(i, i + 100)})
    got = list(r.scan_iter(count=250))
    expect((len(got), len(set(got))), (3000, 3000), "SCAN gives each key once")
    expect(len(list(r.scan_iter(match="scan:1*", count=500))), 1111, "SCAN MATCH")
    expect(len(r.keys("scan:*")), 3000, "KEYS")
    expect(r.dbsize(), 3000, "DBSIZE")
    expect(r.randomkey().startswith("scan:"), True, "RANDOMKEY")


def scripts(r):
    add = r.register_script("return redis.call('INCRBY', KEYS[1], ARGV[1])")
    for i in range(30):
        expect(add(keys=[f"script{i}"], args=[i]), i, "a registered script")
    sha = r.script_load("return ARGV[1]")
    expect(r.script_exists(sha), [True], "SCRIPT EXISTS")
    for i in range(20):
        expect(r.evalsha(sha, 1, f"key{i}", "hello"), "hello", "EVALSHA at every node")
    expect(r.eval("return {1, 'two', {3}}", 0), [1, "two", [3]], "EVAL of an array")
    fails_with(redis.exceptions.NoScriptError, "", lambda: r.evalsha("f" * 40, 0), "EVALSHA of nothing")
    code = "#!lua name=lib\nredis.register_function('double', function(keys, args) return redis.call('INCRBY', keys[1], 2 * args[1]) end)"
    expect(r.function_load(code, replace=True), "lib", "FUNCTION LOAD")
    for i in range(10):
        expect(r.fcall("double", 1, f"fn{i}", 4), 8, "FCALL at every node")
    expect(len(r.function_list()), 1, "FUNCTION LIST")
    expect(bool(r.function_delete("lib")), True, "FUNCTION DELETE")


def transactions(r):
    r.set("{t}a", 1)
    got = r.pipeline(transaction=True).incr("{t}a").get("{t}a").hset("{t}h", "f", "v").hgetall("{t}h").execute()
    expect(got, [2, "2", 1, {"f": "v"}], "a transaction")
    with r.pipeline() as pipe:
        pipe.watch("{t}a")
        value = int(pipe.get("{t}a"))
        pipe.multi()
        pipe.set("{t}a", value + 1)
        expect(pipe.execute(), [True], "a transaction with WATCH")
        pipe.watch("{t}a")
        r.set("{t}a", 100)
        pipe.multi()
        pipe.set("{t}a", 0)
        fails_with(redis.WatchError, "", pipe.execute, "a watched key that has changed")

    def increment(p):
        p.multi()
        p.incr("{t}a")

    expect(r.transaction(increment, "{t}a"), [101], "transaction()")
    pipe = r.pipeline().set("{t}a", "x").lpush("{t}a", 1)
    fails_with(redis.ResponseError, "WRONGTYPE", pipe.execute, "an error inside a transaction")
    over_slots = r.pipeline().set("a", 1).set("b", 2).execute
    if is_single_database:
        fails_with(redis.ResponseError, "Keys in request", over_slots, "a transaction over slots of a cluster")
    else:
        expect(over_slots(), [True, True], "a transaction over several nodes")
    lock = r.lock("lock", timeout=10)
    expect((lock.acquire(), lock.locked()), (True, True), "a lock")
    lock.release()


def blocking(r):
    expect(r.blpop(["{q}a", "{q}b"], timeout=0.05), None, "BLPOP of nothing")
    results = []
    waiting = [threading.Thread(target=lambda: results.append(r.blpop("{q}a", timeout=10))) for _ in range(5)]
    for thread in waiting:
        thread.start()
    for i in range(5):
        r.rpush("{q}a", i)
    for thread in waiting:
        thread.join()
    expect(sorted(value for _, value in results), list("01234"), "BLPOP of threads")
    r.rpush("{q}a", "moved")
    expect(r.blmove("{q}a", "{q}b", 1), "moved", "BLMOVE")
    expect(r.xread({"{q}x": "$"}, block=20) in ([], {}), True, "XREAD BLOCK of nothing")
    r.zadd("{q}z", {"m": 1})
    expect(tuple(r.bzpopmin("{q}z", 1)), ("{q}z", "m", 1.0), "BZPOPMIN")
    expect(r.wait(0, 10), 0, "WAIT")


def connection(protocol):
    r = redis.Redis(**where, protocol=protocol, decode_responses=True, client_name="check", db=database)
    r.set("db", "three")
    expect(r.client_getname(), "check", "CLIENT GETNAME")
    expect(r.client_info()["db"], database, "CLIENT INFO")
    expect(r.client_id() > 0, True, "CLIENT ID")
    expect(any(c["name"] == "check" for c in r.client_list()), True, "CLIENT LIST")
    if database:
        expect(redis.Redis(**where, protocol=protocol).get("db"), None, "another database")
    info = r.info()
    expect("redis_version" in info and info["role"] == "master", True, "INFO")
    expect(r.info("keyspace")[f"db{database}"]["keys"], 1, "INFO keyspace")
    expect(r.config_get("maxmemory")["maxmemory"] is not None, True, "CONFIG GET")
    expect(len(r.time()), 2, "TIME")
    expect(r.echo("x"), "x", "ECHO")
    expect(r.command_count() > 200, True, "COMMAND COUNT")
    r.flushdb()
    r.close()


def threads():
    pool = redis.Redis(**where, decode_responses=True, max_connections=16).connection_pool
    wrong = []

    def work(me):
        r = redis.Redis(connection_pool=pool)
        for i in range(300):
            r.set(f"t{me}:{i % 7}", f"{me}:{i}")
            if r.get(f"t{me}:{i % 7}") != f"{me}:{i}":
                wrong.append((me, i))

    running = [threading.Thread(target=work, args=(me,)) for me in range(8)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    expect(wrong, [], "values of threads over a pool")


def messages(protocol):
    r = redis.Redis(**where, protocol=protocol, decode_responses=True)
    p = r.pubsub()
    p.subscribe("news", "sport")
    p.psubscribe("n*")
    expect(sorted(p.get_message(timeout=10)["type"] for _ in range(3)), ["psubscribe", "subscribe", "subscribe"], "confirmations")
    expect(r.publish("news", "hello"), 2, "PUBLISH counts the channel and the pattern")
    got = [p.get_message(timeout=10) for _ in range(2)]
    expect(sorted((m["type"], m["channel"], m["data"]) for m in got), [("message", "news", "hello"), ("pmessage", "news", "hello")], "messages")
    expect(r.pubsub_numsub("news", "none"), [("news", 1), ("none", 0)], "PUBSUB NUMSUB")
    expect(sorted(r.pubsub_channels()), ["news", "sport"], "PUBSUB CHANNELS")
    expect(r.pubsub_numpat(), 1, "PUBSUB NUMPAT")
    p.ssubscribe("shard")
    expect(p.get_message(timeout=10)["type"], "ssubscribe", "SSUBSCRIBE")
    expect(r.spublish("shard", "x"), 1, "SPUBLISH")
    expect(p.get_message(timeout=10)["data"], "x", "a shard message")
    p.ping()
    p.unsubscribe()
    seen = []
    while p.channels:
        message = p.get_message(timeout=10)
        if message and message["type"] == "unsubscribe":
            seen.append(message["channel"])
    expect(sorted(seen), ["news", "sport"], "UNSUBSCRIBE")
    p.close()
    # Handlers in a thread, as in applications.
    heard = []
    p = r.pubsub(ignore_subscribe_messages=True)
    p.subscribe(**{"work": lambda message: heard.append(message["data"])})
    thread = p.run_in_thread(sleep_time=0.01)
    end = time.time() + 10
    while len(heard) < 20 and time.time() < end:
        r.publish("work", len(heard))
        time.sleep(0.01)
    thread.stop()
    thread.join()
    expect(len(heard) >= 20, True, "messages in a thread")


def caching():
    other = redis.Redis(**where)
    version = tuple(int(part) for part in other.info("server")["redis_version"].split(".")[:2])
    if version < (7, 4):
        return  # redis-py does not cache with older servers
    r = redis.Redis(**where, protocol=3, decode_responses=True, cache_config=CacheConfig())
    for i in range(50):
        other.set(f"cached{i % 5}", i)
        end = time.time() + 10
        while r.get(f"cached{i % 5}") != str(i):
            expect(time.time() < end, True, "an old value stays in redis-py's cache")
            time.sleep(0.001)
    expect(r.get_cache().size > 0, True, "redis-py caches")


def rights(protocol):
    """Checks the rights of a user who may only read its own keys."""
    full = redis.Redis(**where, protocol=protocol, decode_responses=True)
    expect(full.acl_whoami(), where["username"], "ACL WHOAMI")
    full.mset({"public:a": 1, "public:b": 2, "secret": 3})
    r = redis.Redis(**where | {"username": "reader"}, protocol=protocol, decode_responses=True)
    expect(r.acl_whoami(), "reader", "ACL WHOAMI of a restricted user")
    expect(r.mget("public:a", "public:b"), ["1", "2"], "MGET of what a user may read")
    denied = redis.exceptions.NoPermissionError
    fails_with(denied, "keys", lambda: r.get("secret"), "GET of another's key")
    fails_with(denied, "keys", lambda: r.mget("public:a", "secret"), "MGET of another's key")
    fails_with(denied, "set", lambda: r.set("public:a", 9), "SET by a reader")
    fails_with(denied, "flushall", r.flushall, "FLUSHALL by a reader")
    fails_with(denied, "set", lambda: r.pipeline().get("public:a").set("public:a", 9).execute(), "a transaction of a reader")
    expect(r.pipeline().get("public:a").get("public:a").execute(), ["1", "1"], "a transaction of what it may")
    p = r.pubsub()
    p.subscribe("public:news")
    expect(p.get_message(timeout=10)["type"], "subscribe", "SUBSCRIBE to what a user may hear")
    expect(full.publish("public:news", "x"), 1, "PUBLISH")
    expect(p.get_message(timeout=10)["data"], "x", "a message")
    p.close()
    p = r.pubsub()
    fails_with(denied, "channels", lambda: (p.subscribe("secret"), p.get_message(timeout=10)), "SUBSCRIBE to another channel")
    p.close()
    wrong = redis.Redis(**where | ONCE | {"password": "wrong"}, protocol=protocol)
    fails_with(redis.AuthenticationError, "", wrong.ping, "a wrong password")
    stranger = redis.Redis(**where | ONCE | {"username": None, "password": None}, protocol=protocol)
    fails_with(redis.AuthenticationError, "", stranger.ping, "a client without a name")
    full.flushall()


def verified():
    """Checks that the library verifies the certificate, and that the listener verifies the client's."""
    unknown = ONCE | {key: value for key, value in where.items() if key != "ssl_ca_certs"}
    fails_with(redis.ConnectionError, "CERTIFICATE_VERIFY_FAILED", redis.Redis(**unknown).ping, "a certificate of an unknown authority")
    anonymous = ONCE | {key: value for key, value in where.items() if key not in ("ssl_certfile", "ssl_keyfile")}
    fails_with(redis.ConnectionError, "", redis.Redis(**anonymous).ping, "a client without a certificate")


def main():
    host, port = sys.argv[1].rsplit(":", 1)
    where.update(host=host, port=int(port))
    if len(sys.argv) > 2:
        ca, certificate, key, user, password = sys.argv[2:]
        where.update(ssl=True, ssl_ca_certs=ca, ssl_certfile=certificate, ssl_keyfile=key, username=user, password=password)
        verified()
    for protocol in (2, 3):
        r = redis.Redis(**where, protocol=protocol, decode_responses=True)
        types(r, protocol)
        pipelines(r)
        iteration(r)
        scripts(r)
        transactions(r)
        blocking(r)
        r.flushall()
        connection(protocol)
        messages(protocol)
        if "username" in where:
            rights(protocol)
    caching()
    # The library's default protocol.
    default = redis.Redis(**where)
    expect(default.set("default", "x"), True, "the library's own default")
    expect(default.get("default"), b"x", "the library's own default")
    threads()
    default.flushall()
    print(f"ok: {checks} checks with redis-py {redis.__version__}{' over TLS' if 'ssl' in where else ''}")


main()
