// Model of one Redis server for the recorded workloads: up to four keys, each a string, a list or a hash, with a time to live.
//
// A time to live makes the outcome depend on the clock, which a sequential model does not have. Here it has two bounds: a value set with
// PX n between call and return exists until at least call+n and at most return+n. A reader of nil must return after the earlier bound; a
// reader of the value must be called before the later one.
package main

import (
	"fmt"
	"math"
	"sort"
	"strconv"
	"strings"

	"github.com/anishathalye/porcupine"
)

// never is the return of an operation with unknown outcome.
const never = int64(math.MaxInt64)

// maxKeys is the maximum number of keys of an object.
const maxKeys = 4

type entry struct {
	kind     byte // 0 absent, 's' string, 'l' list, 'h' hash
	value    string
	earliest int64 // earliest expiry; 0 without expiry
	latest   int64
}

type state [maxKeys]entry

type operation struct {
	call, end int64
	slack     int64
	known     bool // whether there is a reply
	do        [][]string
	at        [][]int // keys of each command
	got       []any
	aborted   bool // EXEC returned nil
	condition map[string]*string
	watched   map[int]*string
}

// resolve assigns places in the state to keys. Returns an error for commands that the model does not know.
func (o *operation) resolve(names []string) ([]string, error) {
	place := func(name string) (int, error) {
		for i, n := range names {
			if n == name {
				return i, nil
			}
		}
		if len(names) == maxKeys {
			return 0, fmt.Errorf("more than %d keys in one object: %q", maxKeys, name)
		}
		names = append(names, name)
		return len(names) - 1, nil
	}
	if o.known && !o.aborted && len(o.got) != len(o.do) {
		return nil, fmt.Errorf("%d replies to %d commands", len(o.got), len(o.do))
	}
	for _, command := range o.do {
		if len(command) < 2 {
			return nil, fmt.Errorf("a command without a key: %q", command)
		}
		least, keys := 2, command[1:2]
		switch command[0] {
		case "GET", "GETDEL", "INCR", "HGETALL", "DEL", "PERSIST", "PTTL":
		case "SET":
			least = 3
		case "RPUSH":
			least = 3
		case "HSET":
			least = 4
		case "LRANGE":
			if len(command) != 4 || command[2] != "0" || command[3] != "-1" {
				return nil, fmt.Errorf("only LRANGE key 0 -1, not %q", command)
			}
		case "MGET":
			keys = command[1:]
		case "MSET":
			keys = nil
			for i := 1; i < len(command); i += 2 {
				keys = append(keys, command[i])
			}
			least = 1 + 2*len(keys)
		default:
			return nil, fmt.Errorf("the model does not know %q", command[0])
		}
		if len(command) < least {
			return nil, fmt.Errorf("%q is too short", command)
		}
		at := make([]int, 0, len(keys))
		for _, key := range keys {
			i, err := place(key)
			if err != nil {
				return nil, err
			}
			at = append(at, i)
		}
		o.at = append(o.at, at)
	}
	o.watched = map[int]*string{}
	for key, value := range o.condition {
		i, err := place(key)
		if err != nil {
			return nil, err
		}
		o.watched[i] = value
	}
	return names, nil
}

// writes returns the set of values that the operation would write.
func (o *operation) writes() map[string]bool {
	values := map[string]bool{}
	for _, command := range o.do {
		switch command[0] {
		case "SET":
			values[command[2]] = true
		case "RPUSH":
			for _, value := range command[2:] {
				values[value] = true
			}
		case "HSET":
			for i := 3; i < len(command); i += 2 {
				values[command[i]] = true
			}
		case "MSET":
			for i := 2; i < len(command); i += 2 {
				values[command[i]] = true
			}
		}
	}
	return values
}

var model = porcupine.Model{
	Init: func() interface{} { return state{} },
	Step: func(s, input, _ interface{}) (bool, interface{}) {
		ok, next := input.(*operation).step(s.(state))
		return ok, next
	},
	Equal:             func(a, b interface{}) bool { return a.(state) == b.(state) },
	DescribeOperation: func(input, _ interface{}) string { return describe(input.(*operation)) },
	DescribeState:     func(s interface{}) string { return describeState(s.(state)) },
}

// step returns whether the state allows the replies, and the next state. All commands of an operation take effect at one instant.
func (o *operation) step(s state) (bool, state) {
	if o.aborted {
		return true, s // EXEC without an effect is always allowed, because a watch may become dirty without a change
	}
	for at, value := range o.watched {
		e := s[at]
		same := e.kind == 0 && value == nil || e.kind == 's' && value != nil && e.value == *value
		if !same {
			// The watch must have seen the change. It did if the outcome is unknown.
			return !o.known, s
		}
	}
	for i, command := range o.do {
		var got any
		if o.known {
			got = o.got[i]
		}
		if !o.execute(&s, command, o.at[i], got) {
			return false, s
		}
	}
	return true, s
}

// gone returns whether the value may have expired, or is absent, when the operation was executed.
func (o *operation) gone(e entry) bool {
	return e.kind == 0 || e.earliest != 0 && (o.end == never || o.end+o.slack >= e.earliest)
}

// there returns whether there is a value that may not have expired yet.
func (o *operation) there(e entry, kind byte) bool {
	return e.kind == kind && (e.latest == 0 || e.latest == never || o.call <= e.latest+o.slack)
}

func (o *operation) execute(s *state, command []string, at []int, got any) bool {
	e := &s[at[0]]
	isInteger := func(n int) bool { return !o.known || got == float64(n) }
	isOK := !o.known
	if status, is := got.(map[string]any); is && status["status"] == "OK" {
		isOK = true
	}
	// Checks the reply to a reader of a string. Nil empties the key, because it may be due to the expiry only.
	readString := func(e *entry, got any) bool {
		if got == nil {
			if !o.gone(*e) {
				return false
			}
			*e = entry{}
			return true
		}
		return o.there(*e, 's') && got == e.value
	}
	switch command[0] {
	case "GET":
		return !o.known || readString(e, got)
	case "MGET":
		values, is := got.([]any)
		if !o.known {
			return true
		}
		if !is || len(values) != len(at) {
			return false
		}
		for i, place := range at {
			if !readString(&s[place], values[i]) {
				return false
			}
		}
		return true
	case "MSET":
		for i, place := range at {
			s[place] = entry{kind: 's', value: command[2+2*i]}
		}
		return isOK
	case "GETDEL":
		if o.known && !readString(e, got) {
			return false
		}
		*e = entry{}
		return true
	case "SET":
		next := entry{kind: 's', value: command[2]}
		switch {
		case len(command) == 4 && command[3] == "NX":
			if e.kind != 0 {
				return e.earliest == 0 && (!o.known || got == nil)
			}
		case len(command) == 5 && command[3] == "PX":
			ms, err := strconv.ParseInt(command[4], 10, 64)
			if err != nil {
				return false
			}
			next.earliest, next.latest = o.call+ms*1e6, never
			if o.known {
				next.latest = o.end + ms*1e6
			}
		case len(command) != 3:
			return false
		}
		*e = next
		return isOK
	case "INCR":
		n := 0
		if e.kind != 0 {
			var err error
			if n, err = strconv.Atoi(e.value); err != nil || e.kind != 's' || e.earliest != 0 {
				return false
			}
		}
		*e = entry{kind: 's', value: strconv.Itoa(n + 1)}
		return isInteger(n + 1)
	case "DEL":
		if o.known {
			if got == float64(0) && !o.gone(*e) || got == float64(1) && !(e.kind != 0 && o.there(*e, e.kind)) || got != float64(0) && got != float64(1) {
				return false
			}
		}
		*e = entry{}
		return true
	case "PERSIST":
		has := e.earliest != 0 && o.there(*e, e.kind)
		switch {
		case !o.known:
			if has {
				e.earliest, e.latest = 0, 0
			}
			return true
		case got == float64(1):
			e.earliest, e.latest = 0, 0
			return has
		case got == float64(0):
			if e.kind != 0 && e.earliest == 0 {
				return true
			}
			ok := o.gone(*e)
			*e = entry{}
			return ok
		}
		return false
	case "PTTL":
		if !o.known {
			return true
		}
		left, is := got.(float64)
		switch {
		case !is:
			return false
		case left == -2:
			ok := o.gone(*e)
			*e = entry{}
			return ok
		case left == -1:
			return e.kind != 0 && e.earliest == 0
		}
		if e.kind == 0 || e.earliest == 0 {
			return false
		}
		ns := int64(left) * 1e6
		early, late := o.call+ns-o.slack, o.end+ns+o.slack
		return late >= e.earliest && (e.latest == never || early <= e.latest)
	case "RPUSH":
		if e.kind != 0 && e.kind != 'l' {
			return false
		}
		items := strings.Join(command[2:], " ")
		if e.kind == 'l' {
			items = e.value + " " + items
		}
		*e = entry{kind: 'l', value: items}
		return !o.known || isInteger(strings.Count(items, " ")+1)
	case "LRANGE":
		if !o.known {
			return true
		}
		values, is := got.([]any)
		if !is || e.kind != 0 && e.kind != 'l' {
			return false
		}
		items, is := texts(values)
		return is && strings.Join(items, " ") == e.value
	case "HSET":
		if e.kind != 0 && e.kind != 'h' {
			return false
		}
		fields := parseHash(e.value)
		added := 0
		for i := 2; i+1 < len(command); i += 2 {
			if _, has := fields[command[i]]; !has {
				added++
			}
			fields[command[i]] = command[i+1]
		}
		*e = entry{kind: 'h', value: formatHash(fields)}
		return isInteger(added)
	case "HGETALL":
		if !o.known {
			return true
		}
		values, is := got.([]any)
		if !is || e.kind != 0 && e.kind != 'h' {
			return false
		}
		pairs, is := texts(values)
		if !is || len(pairs)%2 != 0 {
			return false
		}
		fields := map[string]string{}
		for i := 0; i < len(pairs); i += 2 {
			fields[pairs[i]] = pairs[i+1]
		}
		return len(fields)*2 == len(pairs) && formatHash(fields) == e.value
	}
	return false
}

func texts(values []any) ([]string, bool) {
	out := make([]string, 0, len(values))
	for _, v := range values {
		text, is := v.(string)
		if !is {
			return nil, false
		}
		out = append(out, text)
	}
	return out, true
}

func formatHash(fields map[string]string) string {
	names := make([]string, 0, len(fields))
	for name := range fields {
		names = append(names, name)
	}
	sort.Strings(names)
	var out strings.Builder
	for _, name := range names {
		out.WriteString(name + "=" + fields[name] + " ")
	}
	return out.String()
}

func parseHash(text string) map[string]string {
	fields := map[string]string{}
	for _, pair := range strings.Fields(text) {
		name, value, _ := strings.Cut(pair, "=")
		fields[name] = value
	}
	return fields
}

func describe(o *operation) string {
	var parts []string
	for i, command := range o.do {
		text := strings.Join(command, " ")
		if o.known && !o.aborted {
			text += " -> " + show(o.got[i])
		}
		parts = append(parts, text)
	}
	text := strings.Join(parts, "; ")
	for key, value := range o.condition {
		seen := "nil"
		if value != nil {
			seen = *value
		}
		text = fmt.Sprintf("if %s is %s: %s", key, seen, text)
	}
	switch {
	case o.aborted:
		text += " -> aborted"
	case !o.known:
		text += " -> ?"
	}
	return text
}

func show(reply any) string {
	switch r := reply.(type) {
	case nil:
		return "nil"
	case map[string]any:
		return fmt.Sprint(r["status"])
	case []any:
		items := make([]string, 0, len(r))
		for _, item := range r {
			items = append(items, show(item))
		}
		if len(items) > 12 {
			items = append([]string{"..."}, items[len(items)-12:]...)
		}
		return "[" + strings.Join(items, " ") + "]"
	}
	return fmt.Sprint(reply)
}

func describeState(s state) string {
	var parts []string
	for _, e := range s {
		if e.kind == 0 {
			parts = append(parts, "-")
			continue
		}
		value := e.value
		if len(value) > 80 {
			value = "..." + value[len(value)-80:]
		}
		if e.earliest != 0 {
			value += fmt.Sprintf(" (expires from %.0f ms)", float64(e.earliest)/1e6)
		}
		parts = append(parts, value)
	}
	return strings.Join(parts, " | ")
}
