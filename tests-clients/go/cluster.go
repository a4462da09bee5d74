package main

import (
	"fmt"
	"strings"

	"github.com/redis/go-redis/v9"
)

// cluster checks the ClusterClient with a router that looks like a cluster.
func cluster(address string) {
	for _, protocol := range []int{2, 3} {
		r := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{address}, Protocol: protocol, MaxRedirects: 1})
		result("FLUSHALL", "OK")(r.FlushAll(ctx).Result())
		for i := 0; i < 60; i++ {
			key, value := fmt.Sprintf("k%d", i), fmt.Sprint(i)
			result("SET", "OK")(r.Set(ctx, key, value, 0).Result())
			result("GET", value)(r.Get(ctx, key).Result())
		}
		slots, err := r.ClusterSlots(ctx).Result()
		if err != nil || len(slots) != 1 || slots[0].Start != 0 || slots[0].End != 16383 {
			fail("CLUSTER SLOTS: %v %v", slots, err)
		}
		if len(slots[0].Nodes) != 1 || !strings.HasSuffix(address, slots[0].Nodes[0].Addr[strings.LastIndex(slots[0].Nodes[0].Addr, ":"):]) {
			fail("CLUSTER SLOTS names %v", slots[0].Nodes)
		}
		checks += 2
		pipe := r.Pipeline()
		for i := 0; i < 50; i++ {
			pipe.Incr(ctx, fmt.Sprintf("p%d", i))
		}
		replies, err := pipe.Exec(ctx)
		if err != nil || len(replies) != 50 {
			fail("a pipeline over slots: %v", err)
		}
		checks++
		result("EVAL", interface{}(int64(5)))(r.Eval(ctx, "return redis.call('INCRBY', KEYS[1], ARGV[1])", []string{"n"}, 5).Result())
		result("DBSIZE", int64(111))(r.DBSize(ctx).Result())
		reader := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{address}, Protocol: protocol, ReadOnly: true, RouteRandomly: true})
		result("GET by a client that reads from replicas", "1")(reader.Get(ctx, "k1").Result())
		_ = reader.Close()
		result("FLUSHALL", "OK")(r.FlushAll(ctx).Result())
		_ = r.Close()
	}
	fmt.Printf("ok: %d checks with go-redis %s (cluster)\n", checks, redis.Version())
}
