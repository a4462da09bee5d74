"""Checks redis-py's RedisCluster with a router that looks like a cluster (`--cluster`)."""

import sys

import redis

checks = 0


def expect(got, wanted, what):
    global checks
    if got != wanted:
        raise SystemExit(f"{what}: got {got!r}, wanted {wanted!r}")
    checks += 1


def main():
    host, port = sys.argv[1].rsplit(":", 1)
    for protocol in (2, 3):
        r = redis.RedisCluster(host=host, port=int(port), protocol=protocol, decode_responses=True)
        r.flushall()
        nodes = r.get_nodes()
        expect([(n.host, n.port) for n in nodes], [(host, int(port))], "one member")
        for i in range(100):
            expect(r.set(f"k{i}", i), True, "SET")
            expect(r.get(f"k{i}"), str(i), "GET")
        expect(r.mget_nonatomic([f"k{i}" for i in range(10)]), [str(i) for i in range(10)], "MGET over slots")
        expect(r.mset_nonatomic({"a": 1, "b": 2}), [True, True], "MSET over slots")
        expect(r.delete("a", "b", "none"), 2, "DEL over slots")
        expect(r.rpush("{t}l", 1, 2), 2, "RPUSH")
        expect(r.lmove("{t}l", "{t}m", "LEFT", "RIGHT"), "1", "LMOVE in a slot")
        expect(r.dbsize(), 102, "DBSIZE")
        expect(len(list(r.scan_iter(match="k*", count=7))), 100, "SCAN gives each key once")
        expect(r.keyslot("foo"), r.cluster_keyslot("foo"), "CLUSTER KEYSLOT")
        expect(r.eval("return redis.call('INCRBY', KEYS[1], ARGV[1])", 1, "n", 5), 5, "EVAL")
        pipe = r.pipeline()
        for i in range(50):
            pipe.incr(f"p{i}")
        expect(pipe.execute(), [1] * 50, "a pipeline over slots")
        expect(r.cluster_info()["cluster_state"], "ok", "CLUSTER INFO")
        # Reads from replicas are enabled, and there are no replicas.
        reader = redis.RedisCluster(host=host, port=int(port), protocol=protocol, read_from_replicas=True, decode_responses=True)
        expect(reader.get("k1"), "1", "GET by a client that reads from replicas")
        reader.close()
        r.flushall()
        r.close()
    print(f"ok: {checks} checks with redis-py {redis.__version__} (cluster)")


main()
