package main

import (
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// fresh checks that readers of a few hot keys, in both protocols, see no value older than a write acknowledged before the read.
func fresh(address string) {
	const keys, readers = 4, 8
	var told [keys]atomic.Int64
	var over atomic.Bool
	var seen atomic.Int64
	var all sync.WaitGroup
	connect := func(protocol int) *redis.Client {
		return redis.NewClient(&redis.Options{Addr: address, Protocol: protocol})
	}
	name := func(key int) string { return fmt.Sprintf("fresh:%d", key) }
	for key := 0; key < keys; key++ {
		key := key
		all.Add(1)
		go func() {
			defer all.Done()
			r := connect(3)
			defer r.Close()
			for number := int64(1); !over.Load(); number++ {
				var err error
				switch number % 4 {
				case 0:
					err = r.Set(ctx, name(key), number, 0).Err()
				case 1:
					err = r.Set(ctx, name(key), number, time.Minute).Err()
				case 2:
					_, err = r.TxPipelined(ctx, func(pipe redis.Pipeliner) error { return pipe.Set(ctx, name(key), number, 0).Err() })
				default:
					err = r.GetSet(ctx, name(key), number).Err()
				}
				if err != nil {
					fail("a write of %s: %v", name(key), err)
				}
				told[key].Store(number)
				time.Sleep(2 * time.Millisecond)
			}
		}()
	}
	for reader := 0; reader < readers; reader++ {
		reader := reader
		all.Add(1)
		go func() {
			defer all.Done()
			r := connect(2 + reader%2)
			defer r.Close()
			for !over.Load() {
				for key := 0; key < keys; key++ {
					least := told[key].Load()
					value, err := r.Get(ctx, name(key)).Result()
					if err == redis.Nil {
						value, err = "0", nil
					}
					number, parsed := strconv.ParseInt(value, 10, 64)
					if err != nil || parsed != nil || number < least {
						fail("%s: %q (%v), where %d was answered", name(key), value, err, least)
					}
					seen.Add(1)
				}
			}
		}()
	}
	time.Sleep(3 * time.Second)
	over.Store(true)
	all.Wait()
	fmt.Printf("ok: %d checks\n", seen.Load())
}
