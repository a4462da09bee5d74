package main

import (
	"fmt"
	"math/rand"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
)

// history returns a history of one list on one server, sometimes damaged: an outcome forgotten, a reply changed, a time moved, an item
// lost or in another place.
func history(random *rand.Rand) []porcupine.Operation {
	var ops []porcupine.Operation
	var list []any
	now := int64(0)
	steps := 3 + random.Intn(9)
	for i := 0; i < steps; i++ {
		now += 10
		o := &operation{known: true}
		if random.Intn(3) > 0 {
			item := fmt.Sprint("i", i)
			o.do = [][]string{{"RPUSH", "k", item}}
			if random.Intn(6) == 0 { // unknown outcome
				o.known = false
			}
			if o.known || random.Intn(2) == 0 {
				list = append(list, item)
			}
			o.got = []any{float64(len(list))}
		} else {
			o.do = [][]string{{"LRANGE", "k", "0", "-1"}}
			o.got = []any{append([]any{}, list...)}
		}
		o.at, o.watched = [][]int{{0}}, map[int]*string{}
		call, end := now-int64(random.Intn(40)), now+int64(random.Intn(40))
		if !o.known {
			o.got, end = nil, never
		}
		o.call, o.end = call, end
		ops = append(ops, porcupine.Operation{ClientId: i, Input: o, Call: call, Return: end})
	}
	switch random.Intn(5) {
	case 0: // two items are swapped
		if len(list) > 1 {
			i := random.Intn(len(list) - 1)
			list[i], list[i+1] = list[i+1], list[i]
		}
	case 1: // an item is lost
		if len(list) > 0 {
			i := random.Intn(len(list))
			list = append(append([]any{}, list[:i]...), list[i+1:]...)
		}
	case 2: // an operation is too early
		op := &ops[random.Intn(len(ops))]
		if op.Return != never {
			op.Call, op.Return = op.Call-60, op.Return-60
		}
	case 3: // a read is short
		for _, op := range ops {
			o := op.Input.(*operation)
			if values, is := items(o); is && len(values) > 0 {
				o.got = []any{o.got[0].([]any)[:len(values)-1]}
				break
			}
		}
	}
	final := &operation{known: true, do: [][]string{{"LRANGE", "k", "0", "-1"}}, at: [][]int{{0}}, got: []any{list}, call: now + 100, end: now + 110, watched: map[int]*string{}}
	return bound(append(ops, porcupine.Operation{ClientId: 99, Input: final, Call: final.call, Return: final.end}))
}

func TestTheDirectCheckOfListsAgreesWithTheSearch(t *testing.T) {
	random := rand.New(rand.NewSource(1))
	outcomes := map[porcupine.CheckResult]int{}
	for i := 0; i < 20_000; i++ {
		ops := history(random)
		decided, problem := checkList(ops)
		if !decided {
			for _, op := range ops {
				t.Logf("client %d, %s: %s", op.ClientId, interval(op), describe(op.Input.(*operation)))
			}
			t.Fatalf("history %d is not decided", i)
		}
		searched := porcupine.CheckOperationsTimeout(model, ops, time.Minute)
		outcomes[searched]++
		if (problem == "") != (searched == porcupine.Ok) {
			for _, op := range ops {
				t.Logf("client %d, %s: %s", op.ClientId, interval(op), describe(op.Input.(*operation)))
			}
			t.Fatalf("history %d: the search says %v, the direct check %q", i, searched, problem)
		}
	}
	if outcomes[porcupine.Ok] < 2000 || outcomes[porcupine.Illegal] < 2000 {
		t.Fatalf("the histories are too much alike: %v", outcomes)
	}
	t.Logf("%v", outcomes)
}
