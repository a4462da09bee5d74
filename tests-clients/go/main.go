// Command client-check drives a router with go-redis: connection set-up in both protocols, pipelines, multi-key commands,
// scripts, iteration, types. See ../README.md.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"reflect"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

var (
	ctx    = context.Background()
	checks int
)

func fail(format string, args ...any) {
	fmt.Fprintf(os.Stderr, format+"\n", args...)
	os.Exit(1)
}

// expect compares the result of a command with the expected one.
func expect(what string, wanted any, got any, err error) {
	if err != nil {
		fail("%s: %v", what, err)
	}
	if !reflect.DeepEqual(got, wanted) {
		fail("%s: got %#v, wanted %#v", what, got, wanted)
	}
	checks++
}

func result[T any](what string, wanted T) func(T, error) {
	return func(got T, err error) { expect(what, wanted, got, err) }
}

func types(r *redis.Client) {
	result("FLUSHALL", "OK")(r.FlushAll(ctx).Result())
	result("PING", "PONG")(r.Ping(ctx).Result())
	result("SET EX", "OK")(r.Set(ctx, "k", "v", 1000*time.Second).Result())
	result("GET", "v")(r.Get(ctx, "k").Result())
	if _, err := r.Get(ctx, "none").Result(); !errors.Is(err, redis.Nil) {
		fail("GET of nothing: %v", err)
	}
	result("SET NX", false)(r.SetNX(ctx, "k", "w", 0).Result())
	result("INCRBY", int64(5))(r.IncrBy(ctx, "n", 5).Result())

	pairs := make([]any, 0, 200)
	keys := make([]string, 0, 101)
	values := make([]any, 0, 101)
	for i := 0; i < 100; i++ {
		pairs = append(pairs, fmt.Sprintf("m%d", i), i)
		keys = append(keys, fmt.Sprintf("m%d", i))
		values = append(values, fmt.Sprint(i))
	}
	result("MSET over nodes", "OK")(r.MSet(ctx, pairs...).Result())
	result("MGET over nodes", append(values, nil))(r.MGet(ctx, append(keys, "none")...).Result())
	result("EXISTS over nodes", int64(100))(r.Exists(ctx, append(keys, "none")...).Result())
	result("TOUCH over nodes", int64(100))(r.Touch(ctx, keys...).Result())
	result("UNLINK over nodes", int64(50))(r.Unlink(ctx, keys[:50]...).Result())
	result("DEL over nodes", int64(50))(r.Del(ctx, keys...).Result())

	result("HSET", int64(2))(r.HSet(ctx, "h", "a", 1, "b", 2).Result())
	result("HGETALL", map[string]string{"a": "1", "b": "2"})(r.HGetAll(ctx, "h").Result())
	result("RPUSH", int64(3))(r.RPush(ctx, "l", 1, 2, 3).Result())
	result("LRANGE", []string{"1", "2", "3"})(r.LRange(ctx, "l", 0, -1).Result())
	result("SADD", int64(2))(r.SAdd(ctx, "s", "x", "y").Result())
	result("SMISMEMBER", []bool{true, false})(r.SMIsMember(ctx, "s", "x", "z").Result())
	result("ZADD", int64(2))(r.ZAdd(ctx, "z", redis.Z{Score: 1, Member: "a"}, redis.Z{Score: 2.5, Member: "b"}).Result())
	result("ZRANGE WITHSCORES", []redis.Z{{Score: 1, Member: "a"}, {Score: 2.5, Member: "b"}})(r.ZRangeWithScores(ctx, "z", 0, -1).Result())
	result("XADD", "1-1")(r.XAdd(ctx, &redis.XAddArgs{Stream: "x", ID: "1-1", Values: []any{"f", "v"}}).Result())
	result("XREAD", []redis.XStream{{Stream: "x", Messages: []redis.XMessage{{ID: "1-1", Values: map[string]any{"f": "v"}}}}})(
		r.XRead(ctx, &redis.XReadArgs{Streams: []string{"x", "0"}, Block: -1}).Result())
	result("PFADD", int64(1))(r.PFAdd(ctx, "p", 1, 2).Result())
	result("SET", "OK")(r.Set(ctx, "{c}1", "x", 0).Result())
	result("COPY", int64(1))(r.Copy(ctx, "{c}1", "{c}2", 0, false).Result())
	if err := r.LPush(ctx, "{c}1", "y").Err(); err == nil || !strings.HasPrefix(err.Error(), "WRONGTYPE") {
		fail("LPUSH on a string: %v", err)
	}
}

func pipelines(r *redis.Client) {
	const n = 5000
	commands, err := r.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for i := 0; i < n; i++ {
			pipe.Set(ctx, fmt.Sprintf("pipe%d", i), i, 0)
			pipe.Get(ctx, fmt.Sprintf("pipe%d", i))
		}
		return nil
	})
	if err != nil {
		fail("pipeline: %v", err)
	}
	for i := 0; i < n; i++ {
		result("GET of a pipeline", fmt.Sprint(i))(commands[2*i+1].(*redis.StringCmd).Result())
	}
}

func iteration(r *redis.Client) {
	result("FLUSHDB", "OK")(r.FlushDB(ctx).Result())
	if _, err := r.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for i := 0; i < 3000; i++ {
			pipe.Set(ctx, fmt.Sprintf("scan:%d", i), i, 0)
		}
		return nil
	}); err != nil {
		fail("filling: %v", err)
	}
	seen := map[string]int{}
	iterator := r.Scan(ctx, 0, "scan:*", 250).Iterator()
	for iterator.Next(ctx) {
		seen[iterator.Val()]++
	}
	expect("keys that SCAN gives", 3000, len(seen), iterator.Err())
	for key, times := range seen {
		if times != 1 {
			fail("SCAN gave %s %d times", key, times)
		}
	}
	result("DBSIZE", int64(3000))(r.DBSize(ctx).Result())
}

func scripts(r *redis.Client) {
	add := redis.NewScript("return redis.call('INCRBY', KEYS[1], ARGV[1])")
	for i := 0; i < 30; i++ {
		result("a script", i)(add.Run(ctx, r, []string{fmt.Sprintf("script%d", i)}, i).Int())
	}
	sha, err := r.ScriptLoad(ctx, "return ARGV[1]").Result()
	if err != nil {
		fail("SCRIPT LOAD: %v", err)
	}
	result("SCRIPT EXISTS", []bool{true, false})(r.ScriptExists(ctx, sha, strings.Repeat("f", 40)).Result())
	for i := 0; i < 20; i++ {
		result("EVALSHA at every node", any("hello"))(r.EvalSha(ctx, sha, []string{fmt.Sprint("key", i)}, "hello").Result())
	}
}

func transactions(r *redis.Client) {
	commands, err := r.TxPipelined(ctx, func(pipe redis.Pipeliner) error {
		pipe.Set(ctx, "{t}a", 1, 0)
		pipe.Incr(ctx, "{t}a")
		return nil
	})
	if err != nil || len(commands) != 2 {
		fail("a transaction: %v", err)
	}
	result("INCR of a transaction", int64(2))(commands[1].(*redis.IntCmd).Result())
	increment := func(tx *redis.Tx) error {
		n, err := tx.Get(ctx, "{t}n").Int()
		if err != nil && err != redis.Nil {
			return err
		}
		_, err = tx.TxPipelined(ctx, func(pipe redis.Pipeliner) error {
			pipe.Set(ctx, "{t}n", n+1, 0)
			return nil
		})
		return err
	}
	var group sync.WaitGroup
	for me := 0; me < 8; me++ {
		group.Add(1)
		go func() {
			defer group.Done()
			for done := 0; done < 20; {
				if err := r.Watch(ctx, increment, "{t}n"); err == nil {
					done++
				} else if err != redis.TxFailedErr {
					fail("a transaction with WATCH: %v", err)
				}
			}
		}()
	}
	group.Wait()
	result("increments with WATCH", "160")(r.Get(ctx, "{t}n").Result())
}

func blocking(r *redis.Client) {
	if err := r.BLPop(ctx, 50*time.Millisecond, "{q}l").Err(); err != redis.Nil {
		fail("BLPOP of nothing: %v", err)
	}
	var group sync.WaitGroup
	for me := 0; me < 5; me++ {
		group.Add(1)
		go func() {
			defer group.Done()
			if got, err := r.BRPop(ctx, 10*time.Second, "{q}l").Result(); err != nil || got[0] != "{q}l" {
				fail("BRPOP: %v %v", got, err)
			}
		}()
	}
	for i := 0; i < 5; i++ {
		if err := r.LPush(ctx, "{q}l", i).Err(); err != nil {
			fail("LPUSH: %v", err)
		}
	}
	group.Wait()
	result("LLEN", int64(0))(r.LLen(ctx, "{q}l").Result())
	if err := r.XRead(ctx, &redis.XReadArgs{Streams: []string{"{q}x", "$"}, Block: 20 * time.Millisecond}).Err(); err != redis.Nil {
		fail("XREAD BLOCK of nothing: %v", err)
	}
}

func parallel(r *redis.Client) {
	var group sync.WaitGroup
	for me := 0; me < 16; me++ {
		group.Add(1)
		go func(me int) {
			defer group.Done()
			for i := 0; i < 300; i++ {
				key, value := fmt.Sprintf("p%d:%d", me, i%5), fmt.Sprintf("%d:%d", me, i)
				if err := r.Set(ctx, key, value, 0).Err(); err != nil {
					fail("SET by goroutine %d: %v", me, err)
				}
				if got, err := r.Get(ctx, key).Result(); err != nil || got != value {
					fail("GET by goroutine %d: got %q, wanted %q: %v", me, got, value, err)
				}
			}
		}(me)
	}
	group.Wait()
	checks++
}

// options returns the settings of every connection.
func options(protocol int) *redis.Options {
	o := &redis.Options{Addr: os.Args[1], Protocol: protocol, MaxRetries: -1, ReadTimeout: 20 * time.Second}
	if secured != nil {
		o.TLSConfig, o.Username, o.Password = secured.tls, secured.user, secured.password
	}
	return o
}

func main() {
	if len(os.Args) == 3 && os.Args[2] == "cluster" {
		cluster(os.Args[1])
		return
	}
	if len(os.Args) == 3 && os.Args[2] == "fresh" {
		fresh(os.Args[1])
		return
	}
	over := ""
	switch {
	case len(os.Args) == 8 && os.Args[2] == "secured":
		secured = newSecured(os.Args[3], os.Args[4], os.Args[5], os.Args[6], os.Args[7])
		verified()
		over = " over TLS"
	case len(os.Args) != 2:
		fail("usage: client-check HOST:PORT [cluster | fresh | secured CA-FILE CERT-FILE KEY-FILE USER PASSWORD]")
	}
	for _, protocol := range []int{2, 3} {
		named := options(protocol)
		named.ClientName = "check"
		r := redis.NewClient(named)
		types(r)
		pipelines(r)
		iteration(r)
		scripts(r)
		transactions(r)
		blocking(r)
		parallel(r)
		result("CLIENT GETNAME", "check")(r.ClientGetName(ctx).Result())
		if info, err := r.Info(ctx, "server").Result(); err != nil || !strings.Contains(info, "redis_version") {
			fail("INFO: %v %q", err, info)
		}
		if os.Getenv("SINGLE_DATABASE") == "" {
			fifth := options(protocol)
			fifth.DB = 5
			other := redis.NewClient(fifth)
			result("SET in another database", "OK")(other.Set(ctx, "five", "5", 0).Result())
			result("EXISTS in database 0", int64(0))(r.Exists(ctx, "five").Result())
			_ = other.Close()
		}
		if secured != nil {
			rights(r, protocol)
		}
		result("FLUSHALL", "OK")(r.FlushAll(ctx).Result())
		_ = r.Close()
	}
	fmt.Printf("ok: %d checks with go-redis %s%s\n", checks, redis.Version(), over)
}
