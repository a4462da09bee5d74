// Lists that only grow, decided without a search.
//
// Porcupine tries orders. With dozens of appends of unknown outcome there are too many orders to try in a minute. A list that is only
// appended to and read as a whole needs no search: its last read, which began after all other operations had returned, has the only
// possible order of all appends. Each operation therefore has a place: the n-th append makes n items of n-1, and a read of n items is
// between the n-th append and the next one. It remains to check the times: no operation may have returned before an earlier-placed one
// began. Reads of the same length are in the order of their calls.

package main

import (
	"fmt"
	"sort"

	"github.com/anishathalye/porcupine"
)

// placed is an operation with its place in the only possible order: 2n for the n-th append, 2n+1 for a read of n items.
type placed struct {
	op    porcupine.Operation
	place int
}

// checkList decides a history of RPUSH key item and LRANGE key 0 -1 of one key. `decided` is false if a search is needed: for other
// commands, items written twice, or no last read of the whole list. The operations come from bound, which has left out appends that were
// never executed.
func checkList(ops []porcupine.Operation) (decided bool, problem string) {
	final, quiet := porcupine.Operation{Call: -1}, int64(0)
	writers := map[string]int{}
	for _, op := range ops {
		o := op.Input.(*operation)
		if len(o.do) != 1 || o.aborted || len(o.condition) != 0 || o.at[0][0] != 0 {
			return false, ""
		}
		switch command := o.do[0]; {
		case command[0] == "RPUSH" && len(command) == 3:
			writers[command[2]]++
		case command[0] != "LRANGE":
			return false, ""
		}
		if op.Call > final.Call {
			final = op
		}
	}
	for _, op := range ops {
		if o := op.Input.(*operation); o.known && op.Input != final.Input && op.Return > quiet {
			quiet = op.Return
		}
	}
	last, is := items(final.Input.(*operation))
	if !is || final.Call <= quiet {
		return false, ""
	}
	for _, n := range writers {
		if n > 1 {
			return false, ""
		}
	}
	at := map[string]int{}
	for i, item := range last {
		if _, twice := at[item]; twice {
			return true, fmt.Sprintf("%s is in the list twice and was appended once", item)
		}
		if writers[item] == 0 {
			return true, fmt.Sprintf("%s is in the list, and nobody appended it", item)
		}
		at[item] = i + 1
	}
	order := make([]placed, 0, len(ops))
	for _, op := range ops {
		o := op.Input.(*operation)
		if o.do[0][0] == "RPUSH" {
			n, is := at[o.do[0][2]]
			switch {
			case is && o.known && o.got[0] != float64(n):
				return true, fmt.Sprintf("client %d, %s: %s, but it is item %d", op.ClientId, interval(op), describe(o), n)
			case is:
				order = append(order, placed{op, 2 * n})
			case o.known:
				return true, fmt.Sprintf("client %d, %s: %s is not in the last read", op.ClientId, interval(op), describe(o))
			}
			// An append without a reply that is not in the last read was not executed before it. A read that saw its item anyway is
			// refused below.
			continue
		}
		if !o.known {
			continue // a read without a reply proves nothing
		}
		read, is := items(o)
		if !is {
			return false, ""
		}
		for i, item := range read {
			if at[item] != i+1 {
				return true, fmt.Sprintf("client %d, %s: %s has %s as item %d, the last read as %d (0: not at all)", op.ClientId, interval(op), describe(o), item, i+1, at[item])
			}
		}
		order = append(order, placed{op, 2*len(read) + 1})
	}
	return true, disorder(order)
}

// disorder describes two operations if the later-placed one had returned before the other one began.
func disorder(order []placed) string {
	byReturn := append([]placed(nil), order...)
	sort.Slice(order, func(i, j int) bool { return order[i].op.Call < order[j].op.Call })
	sort.Slice(byReturn, func(i, j int) bool { return byReturn[i].op.Return < byReturn[j].op.Return })
	furthest, returned := placed{place: -1}, 0
	for _, p := range order {
		for ; byReturn[returned].op.Return < p.op.Call; returned++ {
			if byReturn[returned].place > furthest.place {
				furthest = byReturn[returned]
			}
		}
		if furthest.place > p.place {
			return fmt.Sprintf("client %d, %s: %s had returned before client %d, %s: %s began, which stands before it",
				furthest.op.ClientId, interval(furthest.op), describe(furthest.op.Input.(*operation)),
				p.op.ClientId, interval(p.op), describe(p.op.Input.(*operation)))
		}
	}
	return ""
}

// items returns the items that a read of a list saw.
func items(o *operation) ([]string, bool) {
	if !o.known || o.do[0][0] != "LRANGE" {
		return nil, false
	}
	values, is := o.got[0].([]any)
	if !is {
		return nil, false
	}
	return texts(values)
}
