// Command history-check checks whether recorded histories are linearizable.
//
//	history-check [-timeout 60s] [-slack 50ms] [-pictures DIR] FILE.jsonl ...
//
// Each line of a file is one operation (see the README). Operations are grouped by "object": one key, or a few keys of one slot.
// Every object must have an order of its operations that a single Redis server could have executed, each one between its call and its
// return. An operation without a return may have been executed at any time after its call, or never. The search is Porcupine's; the model
// of one Redis is in model.go; lists that only grow need no search (lists.go). No code comes from Switchyard, so a mistake cannot be shared.
//
// Exit codes: 0 linearizable; 1 not; 2 the file cannot be read; 3 undecided: too long a search.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/anishathalye/porcupine"
)

type line struct {
	Object  string             `json:"object"`
	Client  int                `json:"client"`
	Call    int64              `json:"call"`
	Return  *int64             `json:"return"`
	Do      [][]string         `json:"do"`
	Got     []any              `json:"got"`
	If      map[string]*string `json:"if"`
	Aborted bool               `json:"aborted"`
}

type verdict struct {
	object string
	ops    int
	result porcupine.CheckResult
	took   time.Duration
	info   porcupine.LinearizationInfo
	// problem describes a violation that was found without a search.
	problem string
}

func main() {
	timeout := flag.Duration("timeout", time.Minute, "give up on an object after this long")
	slack := flag.Duration("slack", 50*time.Millisecond, "how far an expiry may be from its time")
	pictures := flag.String("pictures", "", "write a picture of each violation to this folder")
	flag.Parse()
	if flag.NArg() == 0 {
		fmt.Fprintln(os.Stderr, "usage: history-check [-timeout 60s] [-slack 50ms] [-pictures DIR] FILE.jsonl ...")
		os.Exit(2)
	}
	objects := map[string][]porcupine.Operation{}
	unknown := 0
	for _, path := range flag.Args() {
		n, err := read(path, slack.Nanoseconds(), objects)
		if err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", path, err)
			os.Exit(2)
		}
		unknown += n
	}
	names := make([]string, 0, len(objects))
	for name := range objects {
		names = append(names, name)
	}
	sort.Strings(names)

	for name := range objects {
		objects[name] = bound(objects[name])
	}

	// Two at a time: a search may take a gigabyte.
	verdicts := make([]verdict, len(names))
	var next int
	var lock sync.Mutex
	var workers sync.WaitGroup
	for i := 0; i < 2; i++ {
		workers.Add(1)
		go func() {
			defer workers.Done()
			for {
				lock.Lock()
				at := next
				next++
				lock.Unlock()
				if at >= len(names) {
					return
				}
				verdicts[at] = check(names[at], objects[names[at]], *timeout)
			}
		}()
	}
	workers.Wait()

	ops, longest := 0, verdict{}
	bad, undecided := []verdict{}, []verdict{}
	for _, v := range verdicts {
		ops += v.ops
		if v.took > longest.took {
			longest = v
		}
		switch v.result {
		case porcupine.Illegal:
			bad = append(bad, v)
		case porcupine.Unknown:
			undecided = append(undecided, v)
		}
	}
	for _, v := range undecided {
		fmt.Printf("undecided: %s, %d operations, nothing found within %v\n", v.object, v.ops, *timeout)
	}
	for i, v := range bad {
		fmt.Printf("NOT LINEARIZABLE: %s, %d operations\n", v.object, v.ops)
		if i < 5 {
			explain(v, objects[v.object], *pictures)
		}
	}
	switch {
	case len(bad) > 0:
		fmt.Printf("failed: %d of %d objects are not linearizable (%d operations, %d without a known outcome)\n", len(bad), len(names), ops, unknown)
		os.Exit(1)
	case len(undecided) > 0:
		fmt.Printf("undecided: %d of %d objects (%d operations, %d without a known outcome)\n", len(undecided), len(names), ops, unknown)
		os.Exit(3)
	case ops == 0:
		fmt.Println("there is no operation to check")
		os.Exit(2)
	}
	fmt.Printf("ok: %d operations on %d objects are linearizable, %d without a known outcome; longest search %v\n", ops, len(names), unknown, longest.took.Round(time.Millisecond))
}

func read(path string, slack int64, objects map[string][]porcupine.Operation) (unknown int, err error) {
	file, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer file.Close()
	keys := map[string][]string{}
	scanner := bufio.NewScanner(file)
	scanner.Buffer(nil, 64<<20)
	for number := 1; scanner.Scan(); number++ {
		var l line
		if err := json.Unmarshal(scanner.Bytes(), &l); err != nil {
			return 0, fmt.Errorf("line %d: %w", number, err)
		}
		op := &operation{call: l.Call, slack: slack, known: l.Return != nil, do: l.Do, got: l.Got, aborted: l.Aborted, condition: l.If}
		end := never
		if l.Return != nil {
			end = *l.Return
		} else {
			unknown++
		}
		op.end = end
		object := filepath.Base(path) + "/" + l.Object
		names := keys[object]
		if names, err = op.resolve(names); err != nil {
			return 0, fmt.Errorf("line %d: %w", number, err)
		}
		keys[object] = names
		objects[object] = append(objects[object], porcupine.Operation{ClientId: l.Client, Input: op, Call: l.Call, Output: nil, Return: end})
	}
	return unknown, scanner.Err()
}

// bound sets the end of operations without an outcome if other replies show one, which keeps the search small. A value that only this
// operation writes was written before a client received it. And an append that is missing in the last read of the whole list, which began
// after all other operations had returned, was not executed before it and can be left out.
func bound(ops []porcupine.Operation) []porcupine.Operation {
	writers, seen := map[string]int{}, map[string]int64{}
	last, quiet := ops[0], int64(0)
	for _, op := range ops {
		o := op.Input.(*operation)
		for value := range o.writes() {
			writers[value]++
		}
		var note func(reply any)
		note = func(reply any) {
			switch r := reply.(type) {
			case string:
				if end, is := seen[r]; !is || op.Return < end {
					seen[r] = op.Return
				}
			case []any:
				for _, item := range r {
					note(item)
				}
			}
		}
		note(o.got)
		if op.Call >= last.Call {
			last = op
		}
	}
	for _, op := range ops {
		if op.Return != never && op.Input != last.Input && op.Return > quiet {
			quiet = op.Return
		}
	}
	final := last.Input.(*operation)
	isFinal := final.known && len(final.do) == 1 && final.do[0][0] == "LRANGE" && last.Call > quiet
	var bounded []porcupine.Operation
	for _, op := range ops {
		if o := op.Input.(*operation); !o.known {
			end, observed := never, false
			for value := range o.writes() {
				if at, is := seen[value]; is && writers[value] == 1 {
					observed = true
					if at < end {
						end = at
					}
				}
			}
			if isFinal && !observed && len(o.do) == 1 && o.do[0][0] == "RPUSH" && writers[o.do[0][2]] == 1 {
				continue
			}
			// A reply before the call is left for the search to refuse.
			if end >= op.Call {
				op.Return = end
			}
		}
		bounded = append(bounded, op)
	}
	return bounded
}

func check(name string, ops []porcupine.Operation, timeout time.Duration) verdict {
	start := time.Now()
	if decided, problem := checkList(ops); decided {
		v := verdict{object: name, ops: len(ops), result: porcupine.Ok, took: time.Since(start), problem: problem}
		if problem != "" {
			v.result = porcupine.Illegal
		}
		return v
	}
	result := porcupine.CheckOperationsTimeout(model, ops, timeout)
	v := verdict{object: name, ops: len(ops), result: result, took: time.Since(start)}
	if result == porcupine.Illegal {
		_, v.info = porcupine.CheckOperationsVerbose(model, ops, timeout)
	}
	return v
}

// explain prints the operations around the end of the longest order.
func explain(v verdict, ops []porcupine.Operation, folder string) {
	if v.problem != "" {
		fmt.Printf("  %s\n", v.problem)
		return
	}
	if folder != "" {
		draw(v, folder)
	}
	longest := 0
	for _, partition := range v.info.PartialLinearizationsOperations() {
		for _, order := range partition {
			if len(order) > longest {
				longest = len(order)
			}
		}
	}
	fmt.Printf("  at most %d of %d operations can be put in an order\n", longest, len(ops))
	sorted := append([]porcupine.Operation(nil), ops...)
	sort.SliceStable(sorted, func(i, j int) bool { return sorted[i].Call < sorted[j].Call })
	from, to := longest-6, longest+6
	if from < 0 {
		from = 0
	}
	if to > len(sorted) {
		to = len(sorted)
	}
	for _, op := range sorted[from:to] {
		fmt.Printf("  client %d, %s: %s\n", op.ClientId, interval(op), describe(op.Input.(*operation)))
	}
}

// draw writes a page with the operations in time, and the orders that were tried.
func draw(v verdict, folder string) {
	name := strings.Map(func(r rune) rune {
		if strings.ContainsRune("/{}:", r) {
			return '-'
		}
		return r
	}, v.object)
	picture := filepath.Join(folder, "violation-"+name+".html")
	if err := porcupine.VisualizePath(model, v.info, picture); err == nil {
		fmt.Printf("  picture: %s\n", picture)
	}
}

func interval(op porcupine.Operation) string {
	if op.Return == never {
		return fmt.Sprintf("%.3f ms to ?", float64(op.Call)/1e6)
	}
	return fmt.Sprintf("%.3f to %.3f ms", float64(op.Call)/1e6, float64(op.Return)/1e6)
}
